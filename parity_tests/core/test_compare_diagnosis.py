"""The diagnosis of ``ring-attn compare``: every planted mistake is named, and nothing is said of what is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ring_attn_cli.compare.cases import Arrays, Case
from ring_attn_cli.compare.diagnosis import diagnose
from ring_attn_cli.compare.oracles import ORACLES
from ring_attn_core.masks import causal, full, sliding_window
from ring_attn_core.reference.oracle import rounding

from ..support.diagnosed import CASES, RANKS, Plant, again, evidence, rank_of

CASE = CASES["plain"]


def one(case: Case, plant: Plant, ranks: int = RANKS, on_one_device: Plant | None = None) -> str:
    """Return the only sentence of the diagnosis."""
    said = diagnose(evidence(case, plant, ranks, on_one_device))
    assert len(said) == 1, said
    return said[0]


def shard_alone(case: Case, rank: int, **starts: Any) -> Arrays:
    """Return the results if only the queries of ``rank`` have cotangents."""
    cotangents = ORACLES["attention"].inputs(case).cotangents
    own = rank_of(case) == rank
    return again(case, dout=cotangents["out"] * own[None, :, None, None], dlse=cotangents["lse"] * own[None, :, None])


def own_part(name: str) -> Plant:
    def plant(case: Case, given: Arrays, result: Arrays) -> Arrays:
        parts = [np.where((rank_of(case) == rank)[:, None, None], shard_alone(case, rank)[name], 0) for rank in range(RANKS)]
        return result | {name: np.sum(parts, 0).astype(np.float32)}

    return plant


MISTAKES: dict[str, tuple[Callable[[Case, Arrays, Arrays], Arrays], str]] = {
    "not scaled": (lambda c, i, r: again(c, scale=1.0), "the scale is wrong: .* 4 times as much, as if they were not scaled"),
    "scale 1% off": (lambda c, i, r: again(c, scale=1.01 * c.factor), "the scale is wrong: .* 1.01 times as much"),
    "bfloat16": (lambda c, i, r: again(c, "bfloat16"), "bfloat16 where float32 was said"),
    "float16": (lambda c, i, r: again(c, "float16"), r"float16 \(or tf32\) where float32 was said"),
    "lost": (lambda c, i, r: r | {"dk": 0 * r["dk"]}, "dk is zero everywhere: the gradient is lost"),
    "averaged": (lambda c, i, r: r | {"dv": r["dv"] / 3}, "dv is 0.3333 times .* averaged over the ranks"),
    "own part of dk": (own_part("dk"), "dk is one rank's part only"),
    "own part of dv": (own_part("dv"), "dv is one rank's part only"),
    "NaN": (
        lambda c, i, r: r | {"out": np.where(r["out"] == r["out"].max(), np.nan, r["out"])},
        "out holds 1 values that are NaN",
    ),
    "noise": (lambda c, i, r: r | {"dq": r["dq"] + 0.1 * r["dq"][:, ::-1]}, "no known mistake explains the error of dq"),
}
MASKS: dict[str, tuple[Case, dict[str, Any], str]] = {
    "no mask": (Case(), {"mask": full()}, "the mask is wrong: there is none, where causal was said"),
    "causal": (Case(mask="full"), {"mask": causal()}, "the mask is wrong: out is that of causal, where full was said"),
    "off by one": (
        Case(),
        {"mask": causal(1)},
        "the mask is wrong: each query sees one key more after it, where causal was said",
    ),
    "after": (
        Case(mask="sliding_window:9:3", alibi=True),
        {"mask": sliding_window(9, 2)},
        "the mask is wrong: each query sees one key less after it",
    ),
    "window": (Case(mask="window:9"), {"mask": sliding_window(8)}, "the mask is wrong: each query sees one key less before it"),
    "strict": (Case(), {"mask": causal(-1)}, "the mask is wrong: no query sees itself, where causal was said"),
    "sign": (Case(mask="window:9"), {"mask": sliding_window(0, 9)}, "the mask is wrong: q_pos - k_pos has the other sign"),
    "key_mask": (Case(key_mask=True, documents=3), {"key_mask": None}, "the mask is wrong: key_mask is not looked at"),
    "extents": (Case(key_mask=True, documents=3), {"extents": None}, "the mask is wrong: extents is not looked at"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_named(case: Case, mistake: str):
    plant, words = MISTAKES[mistake]
    said = one(case, plant)
    assert re.search(words, said), said


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nothing_is_said_of_what_is_right(case: Case):
    assert diagnose(evidence(case, lambda case, given, result: result)) == []


@pytest.mark.parametrize("mistake", MASKS)
def test_another_mask_is_named(mistake: str):
    case, changed, words = MASKS[mistake]
    assert one(replace(case, length=61, head_dim=16), lambda c, i, r: again(c, **changed)).startswith(words)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_a_layout_that_is_taken_for_contiguous_is_named(layout: str):
    case = Case(length=61, head_dim=16, layout=layout)
    held = np.concatenate([list(case.plan(RANKS).positions(rank)) for rank in range(RANKS)])
    held = held[held < case.length]

    def contiguous(case: Case, given: Arrays, result: Arrays) -> Arrays:
        cotangents = ORACLES["attention"].inputs(case).cotangents
        arrays: dict[str, Any] = {name: given[name][:, held] for name in "qkv"}
        shards = again(case, **arrays, dout=cotangents["out"][:, held], dlse=cotangents["lse"][:, held])
        return {name: x[:, np.argsort(held)] for name, x in shards.items() if name in result}

    assert f"shards are taken for contiguous ones and are {layout}" in one(case, contiguous)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_own_keys_only_is_named(layout: str):
    case = Case(length=120, head_dim=16, layout=layout)

    def local(case: Case, given: Arrays, result: Arrays) -> Arrays:
        ranks = rank_of(case)
        out = [again(case, key_mask=(ranks == rank)[None])["out"] for rank in range(RANKS)]
        return result | {"out": np.array(out)[ranks, :, np.arange(case.length)].swapaxes(0, 1)}

    assert one(case, local).startswith("every rank attends to its own keys only")


def test_noise_above_the_bound_is_not_explained_by_another_scale():
    noise = 3e-3 * np.random.default_rng(0).standard_normal((1, 61, 4, 16))
    case = Case(length=61, head_dim=16, dtype="bfloat16")
    assert one(case, lambda c, i, r: r | {"out": r["out"] + noise}) == "no known mistake explains the error of out"


def test_two_lost_gradients_are_both_named():
    lost = lambda case, given, result: result | {"dk": 0 * result["dk"], "dq": 2 * result["dq"]}
    said = diagnose(evidence(CASE, lost))
    assert [words.split(" is ")[0] for words in said] == ["dq", "dk"]


def test_a_gradient_that_is_halved_on_one_device_too_is_not_laid_on_the_ranks():
    halved: Plant = lambda c, i, r: r | {"dv": r["dv"] / 2}
    assert one(CASE, halved, ranks=1) == "dv is 0.5 times what it should be"
    said = one(CASE, halved, ranks=2, on_one_device=halved)
    assert said == "dv is 0.5 times what it should be, on one device too"
    said = one(CASE, halved, ranks=2, on_one_device=lambda c, i, r: r)
    assert said == "dv is 0.5 times what it should be: averaged over the ranks where it should be summed"


@pytest.mark.parametrize("name", ["dq", "dk"])
def test_a_gradient_without_the_scale_is_named(name: str):
    said = one(CASE, lambda c, i, r: r | {name: r[name] / c.factor})
    assert said == f"{name} is 4 times what it should be: the scale is missing in it"
    said = one(CASE, lambda c, i, r: r | {name: r[name] * c.factor}, ranks=4)
    assert said == f"{name} is 0.25 times what it should be: averaged over the ranks where it should be summed, or scaled twice"


def test_an_accumulator_of_bfloat16_is_named():
    keep = rounding("bfloat16")
    said = one(CASE, lambda c, i, r: r | {"out": keep(keep(r["out"] / 3) + keep(2 * r["out"] / 3))})
    assert said.startswith("bfloat16 where float32 was said"), said


def test_an_unknown_mistake_is_not_explained():
    odd: Plant = lambda c, i, r: r | {"dk": r["dk"] * np.linspace(0.5, 1.5, c.length)[:, None, None]}
    assert one(CASE, odd) == "no known mistake explains the error of dk"


def test_beyond_the_longest_sequence_masks_are_not_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ring_attn_cli.compare.diagnosis.LONGEST", 60)
    said = one(CASE, lambda c, i, r: again(c, mask=full()))
    assert said.endswith("masks are tried up to 60 tokens: pass a shorter --length"), said
