"""Hopper's launches with every feature, and what compilers made of them: bytes of stack, reloads in a step without a mask."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ring_attn_core.kernels import steps
from ring_attn_core.kernels.call import RingCall
from ring_attn_core.kernels.hopper import launches as hopper
from ring_attn_core.kernels.launch import Launch

from ..support.compilation import EVERYTHING, PLAIN

HOPPER = replace(PLAIN, hopper=True)
MEASURED: dict[str, dict[str, list[int]]] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""By launch and by release of Triton, the oldest and the newest that was tried: [bytes of stack, registers reloaded]."""


def with_feature(call: RingCall, feature: str) -> RingCall:
    """Return a call with a feature as users' calls have it: under extents there may be keys that no query sees."""
    if feature == "softcap":
        return replace(call, softcap=30.0)
    seen = {"zero_masked": feature == "extents", "fully_masked": feature in ("extents", "key_mask")}
    return replace(call, array_names=frozenset({feature}), dropout_rate=0.1 * (feature == "dropout_seed"), **seen)


def launches() -> dict[str, Launch]:
    """Both passes of heads of 64 and 128, by name: plain, with each feature, in the steps of a ring, with everything at once."""
    made: dict[str, Launch] = {}
    for dim in (64, 128):
        call = replace(HOPPER, head_dim=dim, v_dim=dim)
        for runs in (1, 2):
            of_runs = replace(call, q_runs=runs, k_runs=runs)
            made[f"forward {dim}, {runs} runs"] = steps.forward(of_runs, True, True)
            made[f"backward {dim}, {runs} runs"] = hopper.backward(of_runs, True)
            for feature in (*sorted(EVERYTHING), "softcap"):
                featured = with_feature(of_runs, feature)
                made[f"forward {dim}, {runs} runs, {feature}"] = steps.forward(featured, True, True)
                if feature != "sinks":
                    made[f"backward {dim}, {runs} runs, {feature}"] = hopper.backward(featured, True)
        for first, last in ((True, False), (False, False), (False, True)):
            place = f"{'first' if first else 'last' if last else 'middle'} step"
            made[f"forward {dim}, {place}"] = steps.forward(call, first, last)
        made[f"backward {dim}, keys travel"] = hopper.backward(call, False)
        full = replace(
            call, zero_masked=True, fully_masked=True, q_runs=2, k_runs=2, array_names=EVERYTHING, dropout_rate=0.1, softcap=30.0
        )
        made[f"forward {dim}, everything"] = steps.forward(full, False, True)
        made[f"backward {dim}, everything"] = hopper.backward(full, False)
        made[f"backward {dim}, everything, unaligned"] = hopper.backward(replace(full, aligned=False), False)
    return made
