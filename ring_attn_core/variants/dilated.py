"""Dilated attention as ring attention over the tokens that each head keeps: positions, visibility and ring steps.

A pattern (w, r) splits the sequence into segments of w tokens, and head h keeps the tokens at positions p with
``p % r == h % r``. Heads with equal ``h % r`` form a head group. A rank splits its shard into folded batches, one for each batch
row and head group. A head group keeps one token in each stretch of r tokens, and slot i of its folded batches holds the token of
stretch i. With folded batches as batch rows, a pattern is one ring attention in contiguous layout.

    shard of 8 tokens, r = 2            p   0 1 2 3 4 5 6 7
    group 0 (heads 0, 2, ...)               #   #   #   #         slots 0 1 2 3
    group 1 (heads 1, 3, ...)                 #   #   #   #       slots 0 1 2 3

Slot i of group t on rank R has position ``base(R) + i r + t``. ``base(R)`` is the shard's first position or, if r does not divide
the shard length or the index of the pattern's first head, up to r - 1 positions before it. Then the first or last slot may hold
no token; extents or a key mask hide it. Tokens ascend over all ranks' slots, so a query sees an interval of slots: its extent.

Source: LongNet (Ding et al., arXiv:2307.02486, section 2.2). Ranks, slots and groups are ints or arrays of any framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from ..masks import causal, full
from ..problem.options import Options
from ..problem.problem import Problem
from ..runs import Band, only_where
from ..validation import counts_of, in_words

MIXINGS = ("softmax", "heads")


class Patterns(NamedTuple):
    """Arguments of ``dilated_attention``. ``mixing``: "softmax" if each head uses all patterns, "heads" if each uses one."""

    segments: Any
    dilations: Any
    mixing: Any = "softmax"

    def check(self) -> tuple[tuple[int, int], ...]:
        """Return the (segment, dilation) pairs, in tokens."""
        segments, dilations = counts_of("segments", self.segments), counts_of("dilations", self.dilations)
        if not segments or len(segments) != len(dilations):
            raise ValueError(
                f"pass one dilation for each segment, and at least one of both, got segments={segments} and dilations={dilations}"
            )
        if segments[0] < 1 or any(b <= a for a, b in pairwise(segments)):
            raise ValueError(f"segments must be at least 1 token long and strictly increasing, got {segments}: sort them")
        for segment, dilation in zip(segments, dilations, strict=True):
            if dilation < 1:
                raise ValueError(f"a dilation must be at least 1, got {dilation} in {dilations}: 1 keeps every token")
            if segment % dilation:
                near = " or ".join([str(n * dilation) for n in (segment // dilation, segment // dilation + 1) if n])
                raise ValueError(
                    f"a dilation must divide its segment, got {dilation} for a segment of {segment} tokens: pass a segment of "
                    f"{near}"
                )
        if not isinstance(self.mixing, str) or self.mixing not in MIXINGS:
            raise ValueError(
                f'mixing must be "softmax", every head uses all patterns, or "heads", each uses one, got {in_words(self.mixing)}'
            )
        return tuple(zip(segments, dilations, strict=True))

    def checked(self, heads: int) -> Patterns:
        """Check the patterns for ``heads`` query heads, and return them as tuples. Raise ValueError if they are invalid."""
        pairs = self.check()
        self.check_heads(heads)
        return Patterns(*zip(*pairs, strict=True), self.mixing)  # type: ignore[call-arg]

    def keywords(self, options: Options) -> dict[str, Any]:
        """Return the keyword arguments of ``dilated_attention`` except ``length``, from these patterns and ``options``."""
        names = "mask", "scale", "softcap", "strategy", "backend", "deterministic"
        return self._asdict() | {name: getattr(options, name) for name in names}

    def check_heads(self, heads: int) -> None:
        if self.mixing == "heads" and len(self.segments) > heads:
            raise ValueError(
                f'mixing="heads" gives every pattern a group of heads, got {len(self.segments)} patterns for {heads} heads: '
                'pass fewer patterns, or mixing="softmax"'
            )


def batches_of(problem: Problem, options: Patterns) -> tuple[FoldedBatches, ...]:
    """Return the folded batches of each pattern. Raise ValueError if the problem or the patterns are invalid."""
    patterns, mixing = options.check(), options.mixing
    total = problem.check()
    (_, local, heads, _), (_, kv_local, kv_heads, _) = problem.q_shape, problem.k_shape
    if kv_local != local:
        raise ValueError(
            f"q has {local} tokens and k has {kv_local}: dilated attention is among the tokens of one sequence, pass equally many"
        )
    options.check_heads(heads)
    call: dict[str, Any] = {"group_size": heads // kv_heads, "ranks": problem.ranks, "local": local}
    call |= {"length": total.length, "mask": total.band}
    made = []
    for i, (segment, dilation) in enumerate(patterns):
        segment, dilation = _within(segment, dilation, max(problem.ranks * local, heads))
        own = range(heads) if mixing == "softmax" else [h for h in range(heads) if h * len(patterns) // heads == i]
        made.append(FoldedBatches(segment=segment, dilation=dilation, first=own[0], heads=len(own), **call))
    return tuple(made)


def _within(segment: int, dilation: int, most: int) -> tuple[int, int]:
    """Return (segment, dilation), shortened to fit int32; heads keep the same tokens. ``most``: max(tokens, heads)."""
    # A longer segment is the whole sequence; with a longer dilation a head keeps only the token at its own index.
    dilation = min(dilation, most)
    return min(segment, -(-most // dilation) * dilation), dilation


class HeadSelection(NamedTuple):
    """The heads of an array that a pattern uses (kept heads), and the head groups that hold them.

    To find the kept heads, list the heads ``first`` to ``end`` (exclusive), each ``repeat`` times in succession. Skip ``skip``
    entries of the list, keep the next ``selected``, and number them from 0. The head groups form ``spread`` sets of ``together``
    consecutive groups. Each group of set s has the kept heads with the numbers s, s + ``spread``, s + 2 ``spread``, ... in order.
    """

    first: int
    end: int
    repeat: int
    skip: int
    selected: int
    spread: int
    together: int

    @property
    def padded(self) -> int:
        """Number of kept heads, rounded up so that all groups have the same number of heads."""
        return -(-self.selected // self.spread) * self.spread


@dataclass(frozen=True, kw_only=True)
class FoldedBatches:
    """The folded batches of one pattern (segment, dilation): batch rows that hold only the tokens that a head group keeps.

    ``segment``, ``dilation``: in tokens. ``first``: the first query head that uses the pattern. ``heads``: the number of query
    heads that use it. ``group_size``: query heads per key head. ``ranks``: number of ranks. ``local``: tokens in a shard.
    ``length``: tokens in all shards, without padding. ``mask``: a Band in token positions.
    """

    segment: int
    dilation: int
    first: int
    heads: int
    group_size: int
    ranks: int
    local: int
    length: int
    mask: Band

    @property
    def head_groups(self) -> int:
        """Number of head groups. Group t holds the heads ``first + t``, ``first + t + dilation``, and so on."""
        return min(self.dilation, self.heads)

    @property
    def shift(self) -> int:
        """The value of ``p % dilation`` for the token positions p that group 0 keeps."""
        return self.first % self.dilation

    def front(self, rank: Any) -> Any:
        """Return the number of positions, 0 to ``dilation - 1``, by which a rank's slots begin before its shard."""
        return (rank * self.local - self.shift) % self.dilation

    @cached_property
    def slots(self) -> int:
        """Number of slots (places for one token) of a folded batch, equal on all ranks."""
        return max((self.front(rank) + self.local - 1) // self.dilation + 1 for rank in range(self.ranks))

    @property
    def spanned(self) -> int:
        """Number of token positions that the slots of a rank span, ``dilation`` for each slot."""
        return self.slots * self.dilation

    @property
    def padded(self) -> bool:
        """True if the slots of a rank, each of ``dilation`` positions, span more positions than its shard has."""
        return self.spanned > self.local

    @property
    def aligned(self) -> bool:
        """True if, in every head group, slot i (counted over all ranks) holds the i-th token that the group keeps."""
        return self.shift == 0 and (self.ranks == 1 or self.local % self.dilation == 0)

    @property
    def of_queries(self) -> HeadSelection:
        """The heads of q (or of an array like q, such as out) that the pattern uses, and the head groups that hold them."""
        return HeadSelection(self.first, self.first + self.heads, 1, 0, self.heads, self.head_groups, 1)

    @property
    def of_keys(self) -> HeadSelection:
        """The heads of k and v that the pattern uses, and the head groups that hold them.
        A head group holds a key head once if the pattern uses all its query heads, and one of ``head_groups`` and ``group_size``
        divides the other; else one copy for each query head."""
        first, end = self.first // self.group_size, -(-(self.first + self.heads) // self.group_size)
        whole = self.first % self.group_size == 0 and self.heads % self.group_size == 0
        if whole and self.head_groups % self.group_size == 0:
            return HeadSelection(first, end, 1, 0, end - first, self.head_groups // self.group_size, self.group_size)
        if whole and self.group_size % self.head_groups == 0:
            return HeadSelection(first, end, 1, 0, end - first, 1, self.head_groups)
        return HeadSelection(first, end, self.group_size, self.first - first * self.group_size, self.heads, self.head_groups, 1)

    @property
    def needs_extents(self) -> bool:
        """True if queries need extents: ``band`` may show them slots of other segments, of padding, or outside of the mask."""
        return not (self.aligned and self.segment >= self.length and self.length % self.dilation == 0)

    @property
    def needs_key_mask(self) -> bool:
        """True if an extent over several ranks may contain the first or last slot of a rank although this slot holds no token."""
        return not self.aligned and self.ranks > 1

    @cached_property
    def band(self) -> Band:
        """The mask as a band over slots. If not ``aligned``, it is causal() or full(); extents express the rest of the mask."""
        r, (lo, hi) = self.dilation, (self.mask.lo, self.mask.hi)
        lo, hi = None if lo is None else -(-lo // r), None if hi is None else hi // r
        if self.aligned:
            return Band(lo, hi)
        return causal() if lo == 0 else full()

    def visible(self, rank: Any, slot: Any, group: Any) -> tuple[Any, Any, Any]:
        """Return (holds, first, end) for a slot: whether it holds a token, and the query's extent; (0, 0) if empty.
        ``end`` is exclusive; slots are counted over all ranks. The query may see the slots of its extent that ``band`` allows."""
        p = self.position(rank, slot, group)
        start = rank * self.local
        holds = (p >= start) & (p < start + self.local) & (p < self.length)
        first = p // self.segment * self.segment
        end = _at_most(first + self.segment, self.length)
        lo, hi = self.mask.lo, self.mask.hi
        if hi is not None and not self.aligned:
            first = first + only_where(first < p - hi, p - hi - first)
        if lo is not None and not self.aligned and self.band.lo is None:
            end = _at_most(end, p - lo + 1)
        first = p - (p - first) // self.dilation * self.dilation  # the first position that the group keeps
        last = p + (end - 1 - p) // self.dilation * self.dilation
        some = holds & (first <= last)
        return holds, only_where(some, self.slot_of(first)), only_where(some, self.slot_of(last) + 1)

    def position(self, rank: Any, slot: Any, group: Any) -> Any:
        """Return the position of a slot of group ``group``. A slot whose position is outside of the shard holds no token."""
        return rank * self.local - self.front(rank) + slot * self.dilation + group

    def slot_of(self, position: Any) -> Any:
        """Return the slot, counted over all ranks, of the token at ``position``."""
        rank = position // self.local
        return rank * self.slots + (position - rank * self.local + self.front(rank)) // self.dilation

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The shifts (numbers of ranks that k and v have travelled) at which some rank sees a key, in ascending order."""
        shifts = {0}
        for rank in range(self.ranks):
            start, end = rank * self.local, min((rank + 1) * self.local, self.length)
            for p in (start, end - 1) if start < end else ():
                segment = p // self.segment * self.segment
                first, last = segment, min(segment + self.segment, self.length) - 1
                if self.mask.hi is not None:
                    first = max(first, max(start, segment) - self.mask.hi)
                if self.mask.lo is not None:
                    last = min(last, min(end - 1, last) - self.mask.lo)
                if first <= last:
                    shifts |= {(rank - other) % self.ranks for other in range(first // self.local, last // self.local + 1)}
        return tuple(sorted(shifts))

    def options(self, options: Options) -> Options:
        """Return the ``options`` of the whole call, changed for this pattern's ring attention over folded batches."""
        length = self.length // self.dilation if self.aligned and self.length % self.dilation == 0 else None
        steps = self.steps if self.needs_extents else None
        return replace(options, mask=self.band, length=length, kv_length=None, steps=steps)


Place = tuple[FoldedBatches, HeadSelection]
"""A pattern, and the heads of an array that it uses."""


def places_of(batches: Sequence[FoldedBatches]) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Return the places of the queries, and those of the keys, of each pattern."""
    return tuple((each, each.of_queries) for each in batches), tuple((each, each.of_keys) for each in batches)


def _at_most(x: Any, y: Any) -> Any:
    return x - only_where(x > y, x - y)
