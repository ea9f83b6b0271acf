"""The diagnosis of ``ring-attn compare``: every planted mistake is named, and nothing is said of what is right."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from ring_attn_cli.compare.cases import Arrays, Case  # noqa: E402
from ring_attn_cli.compare.diagnosis import diagnose  # noqa: E402
from ring_attn_cli.compare.diagnosis.dense import Dense  # noqa: E402
from ring_attn_cli.compare.oracles import ORACLES  # noqa: E402
from ring_attn_core.masks import causal, full, sliding_window  # noqa: E402
from ring_attn_core.reference.oracle import rounding  # noqa: E402

from ..support.diagnosed import CASES, RANKS, again, evidence, rank_of  # noqa: E402


def transposed(case: Case, x: Any) -> Any:
    b, s, h, *d = x.shape
    return x.reshape(b, s, case.kv_heads, h // case.kv_heads, *d).swapaxes(2, 3).reshape(x.shape)


def parts(case: Case, given: Arrays) -> tuple[Any, dict[str, Any]]:
    """The rank of every token, and what each rank gives to the gradients of key head 0, for a case with one."""
    cotangents = ORACLES["attention"].inputs(case).cotangents
    ranks = rank_of(case)
    dense = Dense(case, given, range(case.length), case.heads // case.kv_heads)
    return ranks, dense.parts(cotangents["out"][0], cotangents["lse"][0], ranks, RANKS)


def own_part(case: Case, given: Arrays, result: Arrays) -> Arrays:
    ranks, found = parts(case, given)
    dk = result["dk"].copy()
    dk[0, :, 0] = sum(np.where((ranks == rank)[:, None], found["dk"][rank], 0) for rank in range(RANKS))
    return result | {"dk": dk}


def without_rank_1(case: Case, given: Arrays, result: Arrays) -> Arrays:
    _, found = parts(case, given)
    dv = result["dv"].copy()
    dv[0, :, 0] -= found["dv"][1].astype(dv.dtype)
    return result | {"dv": dv}


def two_times_rank_0(case: Case, given: Arrays, result: Arrays) -> Arrays:
    _, found = parts(case, given)
    dq = result["dq"].copy()
    dq[0, :, : found["dq"].shape[2]] += found["dq"][0].astype(dq.dtype)
    return result | {"dq": dq}


MISTAKES: dict[str, tuple[Callable[[Case, Arrays, Arrays], Arrays], str]] = {
    "not scaled": (lambda c, i, r: again(c, scale=1.0), "the scale is wrong: .* 4 times as much, as if they were not scaled"),
    "scale 1% off": (lambda c, i, r: again(c, scale=1.01 * c.factor), "the scale is wrong: .* 1.01 times as much"),
    "transposed heads": (
        lambda c, i, r: r | {name: transposed(c, r[name]) for name in ("out", "lse")},
        "heads of out are in another order: .* they come as 0, 2, 1, 3",
    ),
    "key heads reversed": (
        lambda c, i, r: again(c, k=i["k"][:, :, ::-1], v=i["v"][:, :, ::-1]),
        "query heads read the wrong key heads: 0 to 3 read key heads 1, 1, 0, 0, expected 0, 0, 1, 1",
    ),
    "bfloat16": (lambda c, i, r: again(c, "bfloat16"), "bfloat16 where float32 was said"),
    "float16": (lambda c, i, r: again(c, "float16"), r"float16 \(or tf32\) where float32 was said"),
    "lost": (lambda c, i, r: r | {"dk": 0 * r["dk"]}, "dk is zero everywhere: the gradient is lost"),
    "averaged": (lambda c, i, r: r | {"dv": r["dv"] / 3}, "dv is 0.3333 times .* averaged over the ranks"),
    "own part": (own_part, "dk is one rank's part only"),
    "rank 1 lost": (without_rank_1, "dv is put together wrongly: rank 1's queries count .* times for rank 0's tokens"),
    "rank 0 twice": (two_times_rank_0, "dq is put together wrongly: rank 0's keys count 2 times for rank 0's tokens"),
    "base 2": (lambda c, i, r: r | {"lse": r["lse"] / math.log(2)}, "lse is in base 2"),
    "base 2 with its gradient": (
        lambda c, i, r: (
            again(c, dlse=ORACLES["attention"].inputs(c).cotangents["lse"] / math.log(2)) | {"lse": r["lse"] / math.log(2)}
        ),
        "lse is in base 2",
    ),
    "lse without a gradient": (
        lambda c, i, r: again(c, dlse=0 * ORACLES["attention"].inputs(c).cotangents["lse"]),
        "lse has lost its gradient: dq and dk are those of out alone",
    ),
    "lse off": (lambda c, i, r: r | {"lse": r["lse"] - 1.5}, "lse is -1.5 off everywhere"),
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
    "sign": (Case(mask="window:9"), {"mask": sliding_window(0, 9)}, "the mask is wrong: q_pos - k_pos has the other sign"),
    "key_mask": (Case(key_mask=True, documents=3), {"key_mask": None}, "the mask is wrong: key_mask is not looked at"),
    "extents": (Case(key_mask=True, documents=3), {"extents": None}, "the mask is wrong: extents is not looked at"),
}

OF_ONE_KEY_HEAD = "own part", "rank 1 lost", "rank 0 twice"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_named(case: Case, mistake: str):
    if mistake in OF_ONE_KEY_HEAD:
        case = replace(case, heads=2, kv_heads=1)
    plant, words = MISTAKES[mistake]
    said = diagnose(evidence(case, plant))
    assert len(said) == 1, said
    assert re.search(words, said[0]), said


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nothing_is_said_of_what_is_right(case: Case):
    assert diagnose(evidence(case, lambda case, given, result: result)) == []


@pytest.mark.parametrize("mistake", MASKS)
def test_another_mask_is_named(mistake: str):
    case, changed, words = MASKS[mistake]
    said = diagnose(evidence(replace(case, length=61, head_dim=16), lambda c, i, r: again(c, **changed)))
    assert len(said) == 1 and said[0].startswith(words), said


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

    said = diagnose(evidence(case, contiguous))
    assert len(said) == 1 and f"shards are taken for contiguous ones and are {layout}" in said[0], said


def test_padding_that_counts_as_keys_is_named():
    padded = lambda x: np.concatenate([x, np.zeros_like(x[:, :2])], 1)
    plant = lambda c, i, r: {n: x[:, :61] for n, x in again(c, **_padded(c, i, padded)).items() if n in r}
    said = diagnose(evidence(Case(length=61, head_dim=16, mask="full", layout="contiguous"), plant))
    assert said == ["padding is attended to: hide the keys whose positions are not below length, 2 here"]


def _padded(case: Case, given: Arrays, padded: Callable[[Any], Any]) -> dict[str, Any]:
    cotangents = ORACLES["attention"].inputs(case).cotangents
    arrays = {name: padded(given[name]) for name in "qkv"}
    return arrays | {"dout": padded(cotangents["out"]), "dlse": padded(cotangents["lse"])}


def test_a_gradient_in_another_order_is_named():
    exchanged = lambda x: x.swapaxes(1, 3).reshape(x.shape)
    said = diagnose(evidence(CASES["plain"], lambda c, i, r: r | {"dk": exchanged(r["dk"])}, ranks=1))
    assert len(said) == 1 and said[0].startswith("dk holds the right numbers in another order"), said


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_softmax_of_16_bits_is_named_and_no_scale(dtype: str):
    """As q @ k.T gives it where nobody asks for more: its scale is right, and 1.001 times it would fit the noise better."""
    keep = rounding(dtype)

    def narrow(case: Case, given: Arrays, result: Arrays) -> Arrays:
        k, v = (keep(given[name]).repeat(2, 2) for name in "kv")
        scores = keep(keep(np.einsum("bshd,bthd->bsht", given["q"], k)) * case.factor)
        seen = np.tri(case.length, dtype=bool)[:, None]
        p = keep(np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0))
        lse = keep(np.log(p.sum(-1)) + scores.max(-1))
        return result | {"out": keep(np.einsum("bsht,bthd->bshd", keep(p / keep(p.sum(-1, keepdims=True))), v)), "lse": lse}

    said = diagnose(evidence(Case(length=61, head_dim=16, dtype=dtype), narrow))
    assert len(said) == 1 and said[0].startswith(f"the softmax is computed in {dtype}"), said


def test_noise_above_the_bound_is_no_other_scale():
    noise = 3e-3 * np.random.default_rng(0).standard_normal((1, 61, 4, 16))
    said = diagnose(evidence(Case(length=61, head_dim=16, dtype="bfloat16"), lambda c, i, r: r | {"out": r["out"] + noise}))
    assert said == ["no known mistake explains the error of out"]


def test_two_lost_gradients_are_both_named():
    lost = lambda case, given, result: result | {"dk": 0 * result["dk"], "dq": 2 * result["dq"]}
    said = diagnose(evidence(CASES["plain"], lost))
    assert [words.split(" is ")[0] for words in said] == ["dq", "dk"]


def test_a_gradient_that_comes_home_to_another_rank_is_named():
    shifted = lambda case, given, result: result | {"dk": np.roll(result["dk"], 20, 1)}
    said = diagnose(evidence(Case(length=60, head_dim=16, layout="contiguous"), shifted))
    assert said == ["dk comes home to the wrong ranks: rank 0 that of rank 2, rank 1 that of rank 0, rank 2 that of rank 1"]


@pytest.mark.parametrize("length", [60, 120])
def test_own_keys_only_is_named(length: int):
    """Of a long sequence the last queries alone are looked at."""
    case = Case(length=length, head_dim=16, layout="contiguous")

    def local(case: Case, given: Arrays, result: Arrays) -> Arrays:
        out = [again(Case(length=length // 3, head_dim=16), **_shard(case, rank))["out"] for rank in range(3)]
        return result | {"out": np.concatenate(out, 1)}

    assert "every rank attends to its own keys only" in diagnose(evidence(case, local))[0]


def _shard(case: Case, rank: int) -> dict[str, Any]:
    given = ORACLES["attention"].inputs(case)
    local = case.length // 3
    cut = lambda x: x[:, local * rank : local * (rank + 1)]
    arrays = {name: cut(given.arrays[name]) for name in ("q", "k", "v")}
    return arrays | {"dout": cut(given.cotangents["out"]), "dlse": cut(given.cotangents["lse"])}
