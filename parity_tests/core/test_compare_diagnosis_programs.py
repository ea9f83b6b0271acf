"""The diagnosis of ``ring-attn compare`` names the mistakes that programs of attention have been seen to make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from ring_attn_cli.compare.cases import Arrays, Case  # noqa: E402
from ring_attn_cli.compare.diagnosis import diagnose  # noqa: E402
from ring_attn_core.reference.oracle import rounding  # noqa: E402

from ..support.diagnosed import CASES, RANKS, Plant, again, evidence, rank_of, written_out  # noqa: E402

CASE = CASES["plain"]
STRICT = "the mask is wrong: no query sees itself, where causal was said"
FILLED = "queries that see no key attend to all keys alike"


def one(case: Case, plant: Plant, ranks: int = RANKS, on_one_device: Plant | None = None) -> str:
    """Return the only sentence of the diagnosis."""
    said = diagnose(evidence(case, plant, ranks, on_one_device))
    assert len(said) == 1, said
    return said[0]


@pytest.mark.parametrize("fill", [-np.inf, -1e30, -1e9])
@pytest.mark.parametrize("length", [61, 130])
def test_a_strict_causal_mask_is_named_whatever_fills_it(length: int, fill: float):
    place = np.arange(length)
    strict = place[:, None] > place
    said = one(Case(length=length, head_dim=16), lambda c, i, r: written_out(c, i, strict, fill=fill))
    assert said.startswith(STRICT), said
    assert (FILLED in said) == np.isfinite(fill), said


def test_a_mask_of_finite_scores_is_named_where_a_query_sees_no_key():
    case = replace(CASE, mask="causal:-1")
    place = np.arange(case.length)
    said = one(case, lambda c, i, r: written_out(c, i, place[:, None] > place, fill=-1e30))
    assert said.startswith(FILLED), said


def test_a_backward_without_delta_is_named():
    assert one(CASE, lambda c, i, r: written_out(c, i, delta=0.0)).startswith("the backward lacks delta = rowsum(dout * out)")
    both = one(CASE, lambda c, i, r: written_out(c, i, delta=0.0, dlse=0.0))
    assert both.startswith("the backward lacks delta = rowsum(dout * out) - dlse"), both


def test_a_wrong_sign_of_the_gradient_of_lse_is_named():
    assert "the gradient of lse has the wrong sign" in one(CASE, lambda c, i, r: written_out(c, i, dlse=-1.0))


def test_a_backward_of_each_shards_own_out_and_lse_is_named():
    said = one(CASE, lambda c, i, r: written_out(c, i, of_shards=True, dlse=0.0))
    assert said.startswith("the backward takes each shard's own out and lse"), said


def test_a_gradient_that_is_halved_on_one_device_too_is_not_laid_on_the_ranks():
    halved: Plant = lambda c, i, r: r | {"dv": r["dv"] / 2}
    assert one(CASE, halved, ranks=1) == "dv is 0.5 times what it should be"
    said = one(CASE, halved, ranks=2, on_one_device=halved)
    assert said == "dv is 0.5 times what it should be, on one device too"
    said = one(CASE, halved, ranks=2, on_one_device=lambda c, i, r: r)
    assert said == "dv is 0.5 times what it should be: averaged over the ranks where it should be summed"


def test_a_gradient_that_is_halved_on_one_rank_is_named_with_the_rank():
    halved: Plant = lambda c, i, r: r | {"dv": r["dv"] * np.where(rank_of(c) == 1, 0.5, 1)[:, None, None]}
    assert one(CASE, halved) == "dv is wrong on one rank: 0.5 times what it should be on rank 1"


@pytest.mark.parametrize("name", ["dq", "dk"])
def test_a_gradient_without_the_scale_is_named(name: str):
    said = one(CASE, lambda c, i, r: r | {name: r[name] / c.factor})
    assert said == f"{name} is 4 times what it should be: the scale is missing in it"
    said = one(CASE, lambda c, i, r: r | {name: r[name] * c.factor}, ranks=4)
    assert said == f"{name} is 0.25 times what it should be: averaged over the ranks where it should be summed, or scaled twice"


@pytest.mark.parametrize("feature", ["softcap", "sinks", "alibi_slopes", "dropout_rate"])
def test_a_feature_that_is_not_looked_at_is_named(feature: str):
    case = replace(CASES["everything"], key_mask=False, documents=0, mask="causal")
    without: dict[str, Any] = {feature: 0.0 if feature == "dropout_rate" else None}
    assert one(case, lambda c, i, r: again(c, **without)) == f"{feature} is not looked at: out is that without it"


def test_slopes_of_alibi_with_the_other_sign_are_named():
    case = replace(CASE, alibi=True)
    assert "alibi_slopes have the other sign" in one(case, lambda c, i, r: again(c, alibi_slopes=-i["alibi_slopes"]))


def test_shards_that_are_merged_without_their_lse_are_named():
    def shards(case: Case, given: Arrays) -> list[Any]:
        place = np.arange(case.length)
        causal = place[:, None] >= place
        return [written_out(case, given, causal & (rank_of(case) == rank))["out"] for rank in range(RANKS)]

    assert "merged as if" in one(CASE, lambda c, i, r: r | {"out": np.sum(shards(c, i), 0)})
    assert "merged as if" in one(CASE, lambda c, i, r: r | {"out": np.mean(shards(c, i), 0)})


def test_key_heads_that_are_tiled_are_named():
    tiled = lambda x: np.concatenate([x, x], 2)
    said = one(CASE, lambda c, i, r: r | again(replace(c, kv_heads=4), k=tiled(i["k"]), v=tiled(i["v"])))
    assert said.startswith("query heads read the wrong key heads: 0 to 3 read key heads 0, 1, 0, 1"), said


def test_an_accumulator_of_bfloat16_is_named():
    keep = rounding("bfloat16")
    said = one(CASE, lambda c, i, r: r | {"out": keep(keep(r["out"] / 3) + keep(2 * r["out"] / 3))})
    assert said.startswith("bfloat16 where float32 was said"), said


def test_a_mistake_that_nobody_has_met_is_not_explained():
    odd: Plant = lambda c, i, r: r | {"dk": r["dk"] * np.linspace(0.5, 1.5, c.length)[:, None, None]}
    assert one(CASE, odd) == "no known mistake explains the error of dk"
