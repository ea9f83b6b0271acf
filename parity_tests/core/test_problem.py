"""What a call is checked for: each message says what was expected, what came and what to do."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ring_attn_core import RingPlan, causal
from ring_attn_core.kernels import backends
from ring_attn_core.kernels.backends import BACKENDS, Backend, select
from ring_attn_core.kernels.problem import DTYPES, LATER, STRATEGIES, Problem, refuse_later

GOOD = Problem(
    q_shape=(2, 16, 8, 64),
    k_shape=(2, 12, 2, 64),
    v_shape=(2, 12, 2, 32),
    dtypes=("bfloat16", "bfloat16", "bfloat16"),
    device="cpu",
    ranks=4,
    layout="zigzag",
    mask=causal(),
    length=63,
    kv_length=None,
    scale=None,
    backend="auto",
)


def test_a_problem_without_a_mistake_gives_its_plan():
    assert GOOD.check() == RingPlan("zigzag", causal(), ranks=4, seq_local=16, kv_local=12, length=63, kv_length=48)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 0.125, 1, 0, -2.0])
def test_every_dtype_and_finite_scale_is_taken(dtype: str, scale: float | None):
    replace(GOOD, dtypes=(dtype,) * 3, scale=scale).check()


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"q_shape": (2, 16, 64)}, "q must have 4 dimensions [batch, seq_local, heads, head_dim], got shape [2, 16, 64]"),
    ({"k_shape": (2, 12)}, "k must have 4 dimensions [batch, kv_local, kv_heads, head_dim], got shape [2, 12]"),
    ({"v_shape": ()}, "v must have 4 dimensions [batch, kv_local, kv_heads, v_dim], got shape []"),
    (
        {"v_shape": (2, 14, 2, 64)},
        "k and v must agree in batch, kv_local and kv_heads, got k [2, 12, 2, 64] and v [2, 14, 2, 64]; "
        "only the last dimension may differ",
    ),
    ({"q_shape": (3, 16, 8, 64)}, "q has batch 3 and k has batch 2: pass the same batch rows to both"),
    (
        {"q_shape": (2, 16, 8, 128)},
        "q has head_dim 128 and k has 64: they are multiplied, so they must be equal (v's may differ)",
    ),
    (
        {"q_shape": (2, 16, 7, 64)},
        "q has 7 heads and k has 2: kv heads must divide query heads. For multi-query attention pass 1 kv head.",
    ),
    ({"q_shape": (2, 16, 0, 64)}, "heads must be at least 1, got 0"),
    ({"k_shape": (2, 12, 0, 64), "v_shape": (2, 12, 0, 64)}, "kv_heads must be at least 1, got 0"),
    ({"v_shape": (2, 12, 2, 0)}, "v_dim must be at least 1, got 0"),
    (
        {"dtypes": ("bfloat16", "float32", "bfloat16")},
        "q, k and v must have one dtype, got bfloat16, float32, bfloat16: cast them to the same",
    ),
    ({"dtypes": ("int8",) * 3}, "q, k and v must be one of bfloat16, float16, float32, float64, got int8: cast them first"),
    ({"scale": float("nan")}, "scale must be a finite Python number or None (head_dim ** -0.5), got nan"),
    ({"scale": "0.1"}, "scale must be a finite Python number or None (head_dim ** -0.5), got '0.1'"),
    ({"layout": "spiral"}, "unknown layout 'spiral': choose one of contiguous, striped, zigzag"),
    (
        {"length": 65},
        "length=65 is more than the 4 shards of q hold (16 tokens each, 64 in all): "
        "pass every rank a shard of at least 18 tokens",
    ),
]


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[str(change) for change, _ in ERRORS])
def test_a_mistake_is_answered_with_what_was_expected_what_came_and_what_to_do(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        replace(GOOD, **change).check()
    assert str(error.value) == message


def test_the_fingerprint_tells_problems_apart_and_survives_json():
    def carried(problem: Problem) -> str:
        return json.dumps(problem.fingerprint(), sort_keys=True)

    assert carried(GOOD) == carried(replace(GOOD))
    for change in ({"length": 62}, {"mask": causal(1)}, {"dtypes": ("float16",) * 3}, {"scale": 0.5}, {"layout": "striped"}):
        assert carried(GOOD) != carried(replace(GOOD, **change))


def test_arguments_that_ask_for_nothing_are_let_through():
    refuse_later("auto", **LATER)
    refuse_later("auto", **{name: 0 for name in LATER if name == "dropout_rate"})


@pytest.mark.parametrize("value", [0.5, 1, True, (1, 0), np.zeros(3), np.zeros(())], ids=repr)
@pytest.mark.parametrize("name", LATER)
def test_an_argument_that_nobody_honours_yet_is_refused_by_name(name: str, value: Any):
    with pytest.raises(NotImplementedError, match=f"{name} is part of the public signature but does not work yet; leave it at "):
        refuse_later("auto", **{name: value})


@pytest.mark.parametrize("strategy", ["ulysses", None, ""])
def test_an_unknown_strategy_is_refused_with_the_names_there_are(strategy: Any):
    with pytest.raises(ValueError, match=f"unknown strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}"):
        refuse_later(strategy)


def backends_of(monkeypatch: pytest.MonkeyPatch, **objections: str | None) -> None:
    candidates = (Backend(name, lambda problem, reason=reason: reason) for name, reason in objections.items())
    monkeypatch.setattr(backends, "BACKENDS", tuple(candidates))


def test_some_backend_solves_every_good_problem():
    assert select(GOOD) in [backend.name for backend in BACKENDS]
    assert select(GOOD, "blockwise") == "blockwise"


def test_auto_takes_the_first_backend_without_an_objection(monkeypatch: pytest.MonkeyPatch):
    backends_of(monkeypatch, fast="needs sm_90", middle=None, slow=None)
    assert select(GOOD) == "middle"
    assert select(GOOD, "slow") == "slow"


def test_a_backend_asked_for_by_name_gives_its_own_reason(monkeypatch: pytest.MonkeyPatch):
    backends_of(monkeypatch, fast="needs sm_90", slow=None)
    with pytest.raises(ValueError, match=r"backend='fast' cannot run this: fast: needs sm_90$"):
        select(GOOD, "fast")


def test_auto_lists_every_reason_where_all_object(monkeypatch: pytest.MonkeyPatch):
    backends_of(monkeypatch, fast="needs sm_90", slow="is off")
    with pytest.raises(ValueError, match=r"backend='auto' cannot run this: fast: needs sm_90; slow: is off$"):
        select(GOOD)


def test_an_unknown_backend_is_refused_with_the_names_there_are(monkeypatch: pytest.MonkeyPatch):
    backends_of(monkeypatch, fast=None, slow=None)
    with pytest.raises(ValueError, match=r"unknown backend 'flash': choose .auto. or one of fast, slow$"):
        select(GOOD, "flash")
