"""The messages and bytes that a rank sends in a call, by strategy, computed from the plan of the call.

Tests compare these numbers with real transfers. ``data/reader.py`` counts the bytes that a rank reads from the files of a
dataset; ``problem/decode.py`` states how many bytes of one layer's cache a decoding step reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..plan.direct import DirectPlan
from ..plan.needed import NeededPlan
from ..plan.two_level import TwoLevelPlan
from .checks import ITEM
from .problem import Problem
from .strategies import IN_GLOBAL_ORDER


class Traffic(NamedTuple):
    """The messages and bytes that one rank sends, equal on all ranks except with "direct". Arrays sent to a rank together are one
    message; an all-gather is one message to each other rank."""

    messages: int
    bytes: int

    def __add__(self, other: Traffic) -> Traffic:  # type: ignore[override]
        return Traffic(self.messages + other.messages, self.bytes + other.bytes)

    def times(self, count: int) -> Traffic:
        return Traffic(self.messages * count, self.bytes * count)


@dataclass(frozen=True)
class SentSizes:
    """The heads, key shards and, if the message holds only a part of a shard, tokens (``slice``) in a message."""

    problem: Problem
    heads: int
    kv_heads: int
    shards: int = 1
    slice: int | None = None

    @property
    def item(self) -> int:
        return ITEM[self.problem.dtypes[0]]

    @property
    def wide(self) -> int:
        """Return the bytes per element in the accumulation dtype."""
        return max(4, self.item)

    @property
    def kv(self) -> int:
        """Return the number of elements of k and v together, or of k alone if the values are columns of k."""
        (b, _, _, d), e = self.problem.k_shape, self.problem.v_shape[-1]
        return b * self.keys * self.kv_heads * (d if self.problem.options.values_in_keys else d + e)

    @property
    def keys(self) -> int:
        """Return the number of keys in the message for each batch row."""
        return (self.problem.k_shape[1] if self.slice is None else self.slice) * self.shards

    @property
    def queries(self) -> int:
        """Return the number of (query, head) pairs in the shard, over all batch rows."""
        return self.problem.q_shape[0] * self.problem.q_shape[1] * self.heads

    @property
    def of_keys(self) -> int:
        """Return the bytes of the key mask, 1 bit per key, and of the key extents, 8 bytes per key. Absent arrays count 0."""
        b, names = self.problem.k_shape[0], {array.name for array in self.problem.arrays}
        return b * -(-self.keys // 8) * ("key_mask" in names) + b * self.keys * 8 * ("key_extents" in names)

    @property
    def of_queries(self) -> int:
        """Return the bytes of the query extents, 8 bytes per query, or 0 if the call has no query extents."""
        return self.problem.q_shape[0] * self.problem.q_shape[1] * 8 * any(x.name == "extents" for x in self.problem.arrays)


def traffic(problem: Problem, rank: int = 0) -> tuple[Traffic, Traffic]:
    if problem.options.values_in_keys:
        return _traffic(problem, rank)[0], _traffic(problem.ordinary, rank)[1]
    return _traffic(problem, rank)


def _traffic(problem: Problem, rank: int) -> tuple[Traffic, Traffic]:
    if problem.strategy == "direct":
        return _direct(problem, rank)
    formulas = {"ring": _ring, "gather": _gather, "ulysses": _ulysses, "two_level": _two_level, IN_GLOBAL_ORDER: _global}
    return formulas.get(problem.strategy, _once_a_shift)(problem)


def _direct(problem: Problem, rank: int) -> tuple[Traffic, Traffic]:
    """Return the traffic (forward, backward) of ``rank`` with "direct"; the backward sends keys again, and gradients to owners.
    JAX pads each nonempty slice to the longest of any rank at the same key run and shift, and the padding counts."""
    plan, even = problem.steps, problem.framework == "jax"
    if isinstance(plan, NeededPlan):
        return _balanced_direct(problem, plan, rank)
    assert isinstance(plan, DirectPlan)

    def sizes(owner: int, shift: int) -> list[SentSizes]:
        tokens = [each.tokens(owner % plan.ranks, even) for each in plan.slices(shift)]
        return [SentSizes(problem, 0, problem.k_shape[2], slice=count) for count in tokens if count]

    keys = gradients = Traffic(0, 0)
    for shift in plan.shifts[1:]:
        sent, got = sizes(rank, shift), sizes(rank - shift, shift)
        keys += Traffic(bool(sent), sum(each.kv * each.item + each.of_keys for each in sent))
        gradients += Traffic(bool(got), sum(each.kv * each.wide for each in got))
    return keys, keys + gradients


def _balanced_direct(problem: Problem, plan: NeededPlan, rank: int) -> tuple[Traffic, Traffic]:
    """Return the traffic (forward, backward) of ``rank`` with "direct" in a balanced layout; a key mask takes 1 byte per key."""
    others = [other for other in range(plan.ranks) if other != rank % plan.ranks]
    padded = problem.framework == "jax"
    count = lambda owner, reader: plan.most_tokens if padded else plan.tokens(owner, reader)
    masked = problem.k_shape[0] * any(array.name == "key_mask" for array in problem.arrays)
    keys = gradients = Traffic(0, 0)
    for other in others:
        out, back = (SentSizes(problem, 0, problem.k_shape[2], slice=count(*pair)) for pair in ((rank, other), (other, rank)))
        masks = out.of_keys + masked * (out.keys - -(-out.keys // 8))
        keys += Traffic(bool(out.keys), out.kv * out.item + masks)
        gradients += Traffic(bool(back.keys), back.kv * back.wide)
    return keys, keys + gradients


def _ring(problem: Problem) -> tuple[Traffic, Traffic]:
    """Return the traffic (forward, backward) of "ring", or of the ring between "ulysses" groups with all their shards."""
    plan = problem.steps
    head_split = plan.head_split
    kv_heads = problem.k_shape[2] if head_split is None else head_split.k_local
    sizes = SentSizes(problem, 0, kv_heads, plan.k_shards)
    keys = Traffic(1, sizes.kv * sizes.item + sizes.of_keys).times(len(plan.hops))
    return keys, keys + Traffic(1, sizes.kv * sizes.wide).times(len(plan.hops) + (plan.home > 0))


def _once_a_shift(problem: Problem) -> tuple[Traffic, Traffic]:
    """Return the traffic (forward, backward) of "two_way" and "push": one shard for each shift but 0."""
    sizes, hops = SentSizes(problem, 0, problem.k_shape[2]), len(problem.plan.hops)
    keys = Traffic(1, sizes.kv * sizes.item + sizes.of_keys).times(hops)
    return keys, keys + Traffic(1, sizes.kv * sizes.wide).times(hops)


def _gather(problem: Problem) -> tuple[Traffic, Traffic]:
    sizes, others = SentSizes(problem, 0, problem.k_shape[2]), problem.ranks - 1
    groups = problem.steps.groups
    arrays = groups + sum(array.name in ("key_mask", "key_extents") for array in problem.arrays)
    keys = Traffic(arrays, sizes.kv * sizes.item + sizes.of_keys).times(others)
    return keys, keys + Traffic(groups, sizes.kv * sizes.wide).times(others)


def _global(problem: Problem) -> tuple[Traffic, Traffic]:
    """Return the traffic (forward, backward) of ``order="global"``: queries and keys, then also out, lse and their gradients."""
    sizes, others = SentSizes(problem, problem.q_shape[2], problem.k_shape[2]), problem.ranks - 1
    d, e = problem.q_shape[-1], problem.v_shape[-1]
    arrays = 2 + sum(array.name in ("key_mask", "key_extents", "extents") for array in problem.arrays)
    lse_arrays = 2 if sizes.item >= 4 else 1
    there = Traffic(arrays, sizes.queries * d * sizes.item + sizes.kv * sizes.item + sizes.of_keys + sizes.of_queries)
    again = Traffic(3 + lse_arrays, sizes.queries * (2 * e * sizes.item + (1 + lse_arrays) * sizes.wide))
    return there.times(others), (there + again).times(others)


def _ulysses(problem: Problem) -> tuple[Traffic, Traffic]:
    head_split, d, e = problem.steps.head_split, problem.q_shape[-1], problem.v_shape[-1]
    assert head_split is not None
    sizes = SentSizes(problem, head_split.q_local, head_split.k_local)
    keys = sizes.kv * sizes.item + sizes.of_keys + sizes.of_queries
    q, out, dlse = sizes.queries * d * sizes.item, sizes.queries * e * sizes.item, sizes.queries * sizes.wide
    lse = dlse * (2 if sizes.item >= 4 else 1)  # lse and its rest
    dkv = sizes.kv * (sizes.item if head_split.copies == 1 else sizes.wide)
    there, back = Traffic(1, keys + q), Traffic(1, out + lse)
    there_again, gradients = Traffic(1, keys + q + 2 * out + lse + dlse), Traffic(1, q + dkv)
    forward, backward = _ring(problem)
    others = head_split.ranks - 1
    return (there + back).times(others) + forward, (there_again + gradients).times(others) + backward


def _two_level(problem: Problem) -> tuple[Traffic, Traffic]:
    """Return the traffic of the strategy "two_level" as (forward, backward), inside and between hosts together."""
    plan, sizes = problem.steps, SentSizes(problem, 0, problem.k_shape[2])
    assert isinstance(plan, TwoLevelPlan)
    rings = plan.inner_rings
    crossings = len(rings) - 1
    keys = Traffic(1, sizes.kv * sizes.item + sizes.of_keys).times(crossings + sum(ring.key_hops for ring in rings))
    hops = crossings + (plan.crossing_home > 0) + sum(ring.gradient_hops for ring in rings)
    return keys, keys + Traffic(1, sizes.kv * sizes.wide).times(hops)
