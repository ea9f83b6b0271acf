"""The table of ``strategy="auto"``: the first row that fits a call says the strategy.

A row reads the call and whether the GPUs of all ranks reach each other's memory, which all ranks know. Beside each row stand the
measurements that it rests on: milliseconds of forward plus backward, heads of 128, of one run in benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..plan.balanced_layout import BalancedLayout
from ..plan.needed import NeededPlan
from .checks import ITEM
from .strategies import plan_of_steps

Problem = Any
"""The ``Problem`` of a call. ``problem.py`` imports this file, so it cannot be imported here."""

HALF = 0.5
"""The largest share of a ring's keys that the busiest rank may receive or send under "direct" in a balanced layout."""

SHORT = 2048
"""The most tokens of a rank, over all batch rows, at which the host was measured to limit every strategy of several steps."""

WINDOWED, LONG = 8192, 32768
"""The shortest shards, in tokens, at which "direct" was measured to beat the ring, and "push", under a window."""

MAX_PUSHED = 2**27
"""The largest shard of keys, in bytes, with which "push" was measured. It holds six times as many beside the shard."""


class Rule(NamedTuple):
    """A row of the table: a strategy, the reason for it, and whether it fits a call, with (True) or without reach."""

    strategy: str
    why: str
    fits: Callable[[Problem, bool], bool]


RULES = (
    Rule("ring", "no rank needs the keys of another, so nothing travels", lambda call, reach: not call.plan.travels),
    # Packed documents, 64/8 heads, 8,192 tokens a GPU. Two H200s: direct 3.68, ring 4.44. Four H100s: direct 6.75, ring 11.60.
    Rule(
        "direct",
        f"the busiest rank receives or sends at most {HALF:.0%} of the keys that a ring brings it, in one exchange",
        lambda call, reach: (share := needed_share(call)) is not None and share <= HALF,
    ),
    Rule(
        "ring",
        "in this balanced layout many keys travel, or it is not known that extents stay within its documents",
        lambda call, reach: isinstance(call.options.layout, BalancedLayout),
    ),
    Rule(
        "ring",
        "the other strategies were measured on NVIDIA GPUs, in 16 bits, with the kernels of this library",
        lambda call, reach: not _is_measured(call),
    ),
    # A window of 4,096, 32/8 heads. 65,536 tokens, four H200s: direct 32.9, push 34.5, ring 39.4. 32,768, two H200s: direct 16.1,
    # push 16.7, ring 18.5. 8,192, two H200s: direct 4.81, ring 5.33; in JAX 4.93 and 5.18.
    Rule(
        "direct",
        "of each shard only the keys that the window shows travel",
        lambda call, reach: _is_windowed(call) and call.plan.seq_local >= (LONG if reach else WINDOWED),
    ),
    Rule("ring", "the GPUs of the ranks do not reach each other's memory in this call", lambda call, reach: not reach),
    # Causal, 32/8 heads, 2,048 tokens. Two H200s: gather 2.03, ring 2.34, push 2.64. Four H100s: gather 2.20, push 3.47, ring
    # 4.21.
    Rule(
        "gather",
        f"a rank has at most {SHORT:,} tokens: one step and one transfer take less time than many",
        lambda call, reach: _tokens(call) <= SHORT and not call.has("extents", "key_extents"),
    ),
    # Causal, 32/8 heads. Four H100s, 8,192 tokens: push 15.8, two_way 17.3, ring 17.9, gather 19.0; 32,768: push 241, ring 246.
    # Two H200s, 8,192: push 7.88, direct 8.20, two_way 8.23, ring 8.28. Four H200s, full, 8,192: push 29.9, direct 31.9,
    # ring 32.6. Documents in zigzag, 64/8 heads, four H100s, 8,192: push 8.74, ring 10.70, direct 10.96.
    Rule(
        "push",
        "copy engines move keys and gradients straight between owners and readers, beside the kernels",
        lambda call, reach: _tokens(call) > SHORT and _bytes_of_keys(call) <= MAX_PUSHED,
    ),
    Rule("ring", "no other strategy was measured to be faster at this size", lambda call, reach: True),
)


def choose(problem: Problem, reach: bool = False) -> Rule:
    """Return the row that fits a checked problem. ``reach``: each rank's GPU can copy the memory of all others, on one host."""
    return next(row for row in RULES if row.fits(problem, reach))


def needed_share(problem: Problem) -> float | None:
    """Return the largest share of a ring's keys that a rank receives or sends under "direct" in a balanced layout. Return None in
    another layout, or if not every visible key is known to be sent."""
    layout, limited = problem.options.layout, problem.has("extents")
    if not isinstance(layout, BalancedLayout) or problem.traced_layout or problem.options.steps is not None:
        return None
    if limited and layout.documents and not problem.within_documents:
        return None
    needed = plan_of_steps("direct", problem.plan, problem.q_shape[2], problem.k_shape[2], limited)
    assert isinstance(needed, NeededPlan)
    return needed.busiest(problem.framework == "jax") / max(len(problem.plan.hops) * problem.plan.kv_local, 1)


def _is_measured(problem: Problem) -> bool:
    return problem.capability > 0 and ITEM[problem.dtypes[0]] <= 2 and problem.options.backend in ("auto", "hopper", "triton")


def _is_windowed(problem: Problem) -> bool:
    """Return whether each query sees fewer keys than a shard has."""
    lo, hi = problem.plan.mask.lo, problem.plan.mask.hi
    return lo is not None and hi is not None and hi - lo < problem.plan.kv_local


def _tokens(problem: Problem) -> int:
    return problem.q_shape[0] * problem.q_shape[1]


def _bytes_of_keys(problem: Problem) -> int:
    b, t, g, d = problem.k_shape
    return b * t * g * (d + problem.v_shape[-1]) * ITEM[problem.dtypes[0]]
