"""Dilated attention as rings over the tokens that a head keeps: where they stand, who sees whom, which ranks exchange something.

A pattern (w, r) splits the sequence into segments of w tokens, and head h keeps the tokens at positions ``p % r == h % r``.
Heads of one offset form a *class*. A rank folds its shard into *lanes*: a lane is a batch row and a class, and its i-th *slot*
is the token that the class keeps of the i-th r tokens. Over these lanes, as batch rows, a pattern is one ring attention in
contiguous layout.

    shard of 8 tokens, r = 2            p   0 1 2 3 4 5 6 7
    class 0 (heads 0, 2, ...)               #   #   #   #         slots 0 1 2 3
    class 1 (heads 1, 3, ...)                 #   #   #   #       slots 0 1 2 3

Slot i of class t on rank R is position ``base(R) + i r + t``. Where r does not divide a shard, the base lies up to r - 1 tokens
before the shard, and a slot at either end may hold no token of the rank: a key mask says so. Slots of tokens stand in the order
of positions over the whole ring, so what a query sees of its lane is one interval of them: an extent.

Dilated attention is that of LongNet (Ding et al., arXiv:2307.02486, section 2.2). Pure arithmetic, the same for JAX and PyTorch;
where a rank, a slot or a class is an argument, it may be an int or an array of any framework.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from ..masks import causal, full
from ..mistakes import counts_of, in_words
from ..problem.options import Options
from ..problem.problem import Problem
from ..runs import Band, only_where

MIXINGS = ("softmax", "heads")


class Patterns(NamedTuple):
    """What a call is asked for, as ``dilated_attention`` names it."""

    segments: Any
    dilations: Any
    mixing: Any = "softmax"

    def check(self) -> tuple[tuple[int, int], ...]:
        """Return pairs of a segment and its dilation, in tokens; ValueError for what is no list of patterns, and no mixing."""
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
        """Return the patterns of a layer of so many heads, as tuples; ValueError, as of a call, for ones that do not fit."""
        pairs = self.check()
        self.check_heads(heads)
        return Patterns(*zip(*pairs, strict=True), self.mixing)  # type: ignore[call-arg]

    def check_heads(self, heads: int) -> None:
        """ValueError for more patterns than heads where each head uses one of them."""
        if self.mixing == "heads" and len(self.segments) > heads:
            raise ValueError(
                f'mixing="heads" gives every pattern a group of heads, got {len(self.segments)} patterns for {heads} heads: '
                'pass fewer patterns, or mixing="softmax"'
            )


def lanes_of(problem: Problem, asked: Patterns) -> tuple[Lanes, ...]:
    """Return the lanes of every pattern of a call, once it has passed every check; ValueError says what to do."""
    patterns, mixing = asked.check(), asked.mixing
    total = problem.check()
    (_, local, heads, _), (_, kv_local, kv_heads, _) = problem.q_shape, problem.k_shape
    if kv_local != local:
        raise ValueError(
            f"q has {local} tokens and k has {kv_local}: dilated attention is among the tokens of one sequence, pass equally many"
        )
    asked.check_heads(heads)
    made = []
    for i, (segment, dilation) in enumerate(patterns):
        segment, dilation = _within(segment, dilation, max(problem.ranks * local, heads))
        own = range(heads) if mixing == "softmax" else [h for h in range(heads) if h * len(patterns) // heads == i]
        made.append(
            Lanes(
                segment=segment,
                dilation=dilation,
                first=own[0],
                heads=len(own),
                share=heads // kv_heads,
                ranks=problem.ranks,
                local=local,
                length=total.length,
                mask=total.band,
            )
        )
    return tuple(made)


def _within(segment: int, dilation: int, most: int) -> tuple[int, int]:
    """Return the same pattern for up to ``most`` (at least 1) tokens and heads, in numbers that int32 holds as positions."""
    # A longer segment is all of the sequence; with a longer dilation a head keeps the token of its own number alone.
    dilation = min(dilation, most)
    return min(segment, -(-most // dilation) * dilation), dilation


class Part(NamedTuple):
    """Which heads of an array a pattern uses, and how they go into lanes.

    The heads ``first`` to ``end``, each ``repeat`` times, the first ``skip`` of these left out, ``kept`` that remain. The classes
    are ``spread`` times ``together``: head j of the kept ones goes to the classes ``j % spread * together`` and the next ones,
    ``together`` in all, as head ``j // spread`` of their lanes.
    """

    first: int
    end: int
    repeat: int
    skip: int
    kept: int
    spread: int
    together: int

    @property
    def padded(self) -> int:
        """Heads once every class has equally many."""
        return -(-self.kept // self.spread) * self.spread


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """How one pattern lies over a ring. Frozen and hashable.

    ``segment``, ``dilation``: in tokens. ``first``, ``heads``: the query heads that use the pattern. ``share``: query heads that
    share a key head. ``ranks``, ``local``: members of the ring, tokens of a shard. ``length``: true tokens of all shards.
    ``mask``: a Band in token positions.
    """

    segment: int
    dilation: int
    first: int
    heads: int
    share: int
    ranks: int
    local: int
    length: int
    mask: Band

    # --- the fold ---------------------------------------------------------------------------------------------------

    @property
    def classes(self) -> int:
        """Offsets that some head has: class t holds the heads ``first + t``, ``first + t + dilation``, ..."""
        return min(self.dilation, self.heads)

    @property
    def shift(self) -> int:
        """The offset of class 0."""
        return self.first % self.dilation

    def front(self, rank: Any) -> Any:
        """Return how many tokens before its shard the slots of a rank begin, 0 to dilation - 1."""
        return (rank * self.local - self.shift) % self.dilation

    @cached_property
    def slots(self) -> int:
        """Slots of a lane, as many on every rank."""
        return max((self.front(rank) + self.local - 1) // self.dilation + 1 for rank in range(self.ranks))

    @property
    def spanned(self) -> int:
        """Tokens that the slots of a rank span."""
        return self.slots * self.dilation

    @property
    def padded(self) -> bool:
        """Whether the slots of some rank span more than its shard."""
        return self.spanned > self.local

    @property
    def aligned(self) -> bool:
        """Whether slots are numbered as the kept tokens of a class are, over the whole ring: none in between holds no token."""
        return self.shift == 0 and (self.ranks == 1 or self.local % self.dilation == 0)

    @property
    def of_queries(self) -> Part:
        """How q, and all that is shaped like it, is folded."""
        return Part(self.first, self.first + self.heads, 1, 0, self.heads, self.classes, 1)

    @property
    def of_keys(self) -> Part:
        """How k and v are folded: by their own heads where classes and groups of heads nest, else repeated for every query."""
        first, end = self.first // self.share, -(-(self.first + self.heads) // self.share)
        whole = self.first % self.share == 0 and self.heads % self.share == 0
        if whole and self.classes % self.share == 0:
            return Part(first, end, 1, 0, end - first, self.classes // self.share, self.share)
        if whole and self.share % self.classes == 0:
            return Part(first, end, 1, 0, end - first, 1, self.classes)
        return Part(first, end, self.share, self.first - first * self.share, self.heads, self.classes, 1)

    # --- who sees whom ----------------------------------------------------------------------------------------------

    @property
    def needs_extents(self) -> bool:
        """Whether a band alone does not say who sees whom."""
        return not (self.aligned and self.segment >= self.length and self.length % self.dilation == 0)

    @property
    def needs_key_mask(self) -> bool:
        """Whether some slot between others holds no token, so that an extent would show it."""
        return not self.aligned and self.ranks > 1

    @cached_property
    def band(self) -> Band:
        """The part of the mask that is a band in slots. Of lanes that are not aligned it says causal at most."""
        r, (lo, hi) = self.dilation, (self.mask.lo, self.mask.hi)
        lo, hi = None if lo is None else -(-lo // r), None if hi is None else hi // r
        if self.aligned:
            return Band(lo, hi)
        return causal() if lo == 0 else full()

    def visible(self, rank: Any, slot: Any, of_class: Any) -> tuple[Any, Any, Any]:
        """Return whether the slot of a rank holds a true token, and the first and end of the slots that it sees as a query.

        Slots are counted over the whole ring, ``slots`` a rank. What ``band`` says is left to it. An extent of nothing is (0, 0).
        """
        p = self.position(rank, slot, of_class)
        start = rank * self.local
        holds = (p >= start) & (p < start + self.local) & (p < self.length)
        first = p // self.segment * self.segment
        end = _at_most(first + self.segment, self.length)
        lo, hi = self.mask.lo, self.mask.hi
        if hi is not None and not self.aligned:
            first = _at_least(first, p - hi)
        if lo is not None and not self.aligned and self.band.lo is None:
            end = _at_most(end, p - lo + 1)
        first = p - (p - first) // self.dilation * self.dilation  # of the positions that the class keeps
        last = p + (end - 1 - p) // self.dilation * self.dilation
        some = holds & (first <= last)
        return holds, only_where(some, self.slot_of(first)), only_where(some, self.slot_of(last) + 1)

    def position(self, rank: Any, slot: Any, of_class: Any) -> Any:
        """Return the position of a slot, which may lie outside of the rank's shard: then the slot holds no token."""
        return rank * self.local - self.front(rank) + slot * self.dilation + of_class

    def slot_of(self, position: Any) -> Any:
        """Return the slot of a token, counted over the whole ring."""
        rank = position // self.local
        return rank * self.slots + (position - rank * self.local + self.front(rank)) // self.dilation

    # --- what travels -----------------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The shifts at which some rank sees a token of its segments: within a rank only the first and the last one reach out."""
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
        """Return the options of the ring over these lanes, given those of the call."""
        length = self.length // self.dilation if self.aligned and self.length % self.dilation == 0 else None
        steps = self.steps if self.needs_extents else None
        return replace(options, mask=self.band, length=length, kv_length=None, steps=steps)


def _at_least(x: Any, y: Any) -> Any:
    return x + only_where(x < y, y - x)


def _at_most(x: Any, y: Any) -> Any:
    return x - only_where(x > y, x - y)
