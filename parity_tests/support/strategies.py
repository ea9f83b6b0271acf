"""Cases of every strategy with every value of every axis of combinations.py, and with heads that the strategy can divide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ring_attn_core import Gather, TwoLevel, Ulysses, causal, full, sliding_window
from ring_attn_core.problem.checks import OptionalArray
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem
from ring_attn_core.problem.strategies import Strategy

from .cases import Case
from .combinations import AXES, COMBINATIONS, EVERYTHING, covering

STRATEGIES: dict[str, Strategy] = {
    "direct": "direct",
    "two_way": "two_way",
    "gather": "gather",
    "ulysses": "ulysses",
    "in pairs": Ulysses(ranks=2),
    "two_level": TwoLevel(ranks=2),
    "by heads": Gather(groups=2),
}
"""The strategies besides the ring, which all other tests run, by a name for tests."""


def fitted(case: Case) -> Case:
    """Return ``case`` with numbers of ranks and of heads that its strategy accepts."""
    if isinstance(case.strategy, Gather):
        groups = 1 if case.kv_heads % case.strategy.groups == 0 else case.strategy.groups
        return replace(case, heads=case.heads * groups, kv_heads=case.kv_heads * groups)
    size = case.ranks if case.strategy == "ulysses" else 1
    if not isinstance(case.strategy, str):
        case = replace(case, ranks=-(-case.ranks // case.strategy.ranks) * case.strategy.ranks)
        size = case.strategy.ranks if isinstance(case.strategy, Ulysses) else 1
    return case if case.heads % size == 0 else replace(case, heads=case.heads * size)


def _of(row: dict[str, str]) -> Case:
    axes: dict[str, dict[str, dict[str, Any]]] = AXES | {
        "strategy": {name: {"strategy": strategy} for name, strategy in STRATEGIES.items()}
    }
    return fitted(Case(**{name: value for axis in axes for name, value in axes[axis][row[axis]].items()}))


PAIRS = [_of(row) for row in covering(AXES | {"strategy": STRATEGIES})]
"""Every strategy with every value of every axis, and every pair of these values under some strategy."""

COMBINED = [fitted(replace(case, strategy=strategy)) for strategy in STRATEGIES.values() for case in COMBINATIONS]
"""Every pair of features under every strategy."""

EACH = [fitted(replace(case, strategy=strategy)) for strategy in STRATEGIES.values() for case in EVERYTHING[::-1]]
"""Every feature at once, under every strategy."""

ONE_EACH = [
    EACH[len(EVERYTHING) * [*STRATEGIES].index(name) + which]
    for name, which in (("two_way", 1), ("gather", 2), ("direct", 0), ("in pairs", 0), ("two_level", 1))
]
"""One of these for each strategy: two_way, gather, direct, Ulysses in pairs and two_level."""

SHARED = [
    Case(strategy="ulysses", kv_heads=1),
    Case("striped", strategy="ulysses", ranks=2, heads=6, kv_heads=3, sinks=True, dtype="bfloat16"),
    Case("contiguous", strategy="ulysses", ranks=3, heads=12, kv_heads=2, alibi=True, dropout_rate=0.3),
    Case(strategy=Ulysses(ranks=2), ranks=4, heads=2, kv_heads=1, dtype="bfloat16"),
    Case("contiguous", strategy=Ulysses(ranks=4), ranks=8, heads=8, kv_heads=2, key_mask="random", length=61),
]
"""Key heads that are shared by ranks, or that do not divide them."""

BY_HEADS = [
    Case("striped", ranks=3, strategy=Gather(groups=2), sinks=True, alibi=True, dropout_rate=0.3, softcap=2.0,
         extents="documents", key_mask="random", batch=1),
    Case("contiguous", ranks=2, heads=8, kv_heads=4, strategy=Gather(groups=4), key_extents="any", v_dim=7, dtype="bfloat16"),
    Case(mask=full(), kv_heads=4, strategy=Gather(groups=4), kv_length=61, batch=1, sinks=True, dtype="float16"),
    Case(mask=sliding_window(9), heads=6, kv_heads=6, strategy=Gather(groups=3), extents="any", poison=True, batch=1),
    Case(head_dim=24, v_dim=16, strategy=Gather(groups=2), sinks=True, alibi=True, values_in_keys=True, ranks=2),
    Case(ranks=1, strategy=Gather(groups=2), dropout_rate=0.3, sinks=True),
    Case(dtype="float64", heads=8, strategy=Gather(groups=2), softcap=2.0, alibi=True),
    Case("striped", ranks=8, length=61, heads=12, kv_heads=6, strategy=Gather(groups=6), key_mask="shard", dropout_rate=0.3),
]  # fmt: skip
"""Keys gathered by groups of heads, with every feature, on 1 to 4 ranks and on 8, without rest of the heads."""

SLICED = [
    Case("zigzag", sliding_window(5), 4, length=61, kv_heads=1, sinks=True, key_mask="random", strategy="direct"),
    Case("contiguous", sliding_window(9, 4), length=59, key_extents="any", dropout_rate=0.3, dtype="bfloat16", strategy="direct"),
    Case("zigzag", causal(), 3, length=61, kv_length=50, extents="documents", alibi=True, softcap=2.0, strategy="direct"),
    Case("contiguous", sliding_window(7, 30, -3), 8, length=70, kv_length=61, key_mask="shard", poison=True, strategy="direct"),
    Case("striped", sliding_window(2), 5, length=37, v_dim=5, extents="any", dtype="float16", strategy="direct"),
]
"""Cases of the strategy "direct" with every feature, whose slices are shorter than a shard."""


def of_a_window(layout: str, window: int, local: int) -> Case:
    """Return a case of four ranks of ``local`` tokens with one narrow head, small enough to count what it sends."""
    wide = Case(layout, sliding_window(window), 4, length=4 * local, strategy="direct")
    return replace(wide, batch=1, heads=1, kv_heads=1, head_dim=1, v_dim=1)


def problem_of(case: Case, framework: str) -> Problem:
    """Return the Problem of one rank of ``case``: shapes, dtypes and options, from which its plan follows."""
    plan = case.plan
    q = case.batch, plan.seq_local, case.heads, case.head_dim
    k = case.batch, plan.kv_local, case.kv_heads, case.head_dim
    local = {"extents": (*q[:2], 2), "key_extents": (*k[:2], 2), "key_mask": k[:2]}
    arrays = tuple(OptionalArray(name, local.get(name, x.shape), str(x.dtype)) for name, x in case.features.items())
    sizes: dict[str, Any] = {"length": plan.length, "kv_length": plan.kv_length, **case.v_dims}
    options = Options(layout=plan.layout, mask=plan.mask, strategy=case.strategy, order=case.order, **sizes)
    return Problem(
        q, k, (*k[:3], case.v_dim), (case.dtype, case.dtype, case.dtype), "cpu", plan.ranks, options, arrays, framework=framework
    )
