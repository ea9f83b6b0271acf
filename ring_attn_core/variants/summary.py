"""Summary attention as plain data: who sees which tokens and summaries, which rank pools a part of which block, what travels.

Approximate attention: exact within a window, and beyond it one block of tokens is seen as a few summaries of it. With 12 tokens,
``block=3``, ``window=2`` and one summary a block (# a token that is seen itself, s a block seen as its summary):

    #. . . | . . . | . . . | . . .      the query at 0 sees from first(0) = 0 on
    ###    |       |       |
    ###    | #     |       |            3: first = 3 * floor(1 / 3) = 0
    ###    | ##    |       |
    -s-    | ###   |       |            5: first = 3 * floor(3 / 3) = 3
    -s-    | -s-   | ###   |            8: first = 3 * floor(6 / 3) = 6

So ``first(i) = block * floor(max(i - window, 0) / block)``: at least the last ``window + 1`` tokens are exact, and every earlier
token is in exactly one block that is summarized. ``window >= length - 1`` is exact attention.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import gcd
from typing import Any, NamedTuple

from ..masks import causal, sliding_window
from ..mistakes import hold_numbers, in_words, number_in_words
from ..plan.ring import RingPlan
from ..problem.checks import DTYPES, Given
from ..problem.options import NO_COUNT, Options
from ..records import hashed_once
from ..runs import Band, clamp, only_where

POOLINGS = ("attention", "mean")


@hashed_once
@dataclass(frozen=True, kw_only=True)
class SummaryOptions:
    """What a user asks of one call of ``summary_attention``, each under the name that it has there.

    Raises ValueError for a value of another type or outside its range; whether the values suit the arrays, ``checked`` says.
    """

    block: int
    window: int
    summaries: int = 1
    pooling: str = "attention"
    scale: float | None = None
    softcap: float | None = None
    length: int | None = None
    strategy: str = "auto"
    backend: str = "auto"
    deterministic: bool = False

    def __post_init__(self) -> None:
        hold_numbers(self, ("block", "window", "summaries", "scale", "softcap", "length"))
        for name, least, what in (
            ("block", 1, "the tokens that are summarized together"),
            ("summaries", 1, "how many summaries stand for a block"),
            ("window", 0, "how many tokens before a query it sees exactly, at the least"),
        ):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or not least <= count < NO_COUNT:
                raise ValueError(
                    f"{name} must be an int of at least {least}, {what} (static under jit), got {number_in_words(count)}"
                )
        if self.summaries > self.block:
            raise ValueError(
                f"summaries={self.summaries} of a block of {self.block} tokens are more than it has: pass at most {self.block}"
            )
        if not isinstance(self.pooling, str) or self.pooling not in POOLINGS:
            raise ValueError(f"unknown pooling {in_words(self.pooling)}: choose one of {', '.join(POOLINGS)}")
        if self.pooling == "mean" and self.block % self.summaries:
            raise ValueError(
                f'pooling="mean" cuts a block of {self.block} tokens into summaries={self.summaries} equal parts: pass a divisor '
                'of block, or pooling="attention" and a pool'
            )
        self.exact(causal())

    def exact(self, mask: Band) -> Options:
        """Return the options of exact attention under that mask."""
        return Options(
            layout="contiguous",
            mask=mask,
            length=self.length,
            scale=self.scale,
            softcap=self.softcap,
            strategy=self.strategy,
            backend=self.backend,
            deterministic=self.deterministic,
        )

    @property
    def width(self) -> int:
        """How many tokens one summary is pooled from: a block's, or with ``"mean"`` those of its part."""
        return self.block // self.summaries if self.pooling == "mean" else self.block

    @property
    def stands_for(self) -> float:
        """How many tokens one summary stands for: its logarithm is added to its scores."""
        return self.block / self.summaries

    @property
    def compared(self) -> tuple[tuple[str, Any], ...]:
        """Return the values by name, for ranks that compare them."""
        return tuple([(name, getattr(self, name)) for name in ASKED])


ASKED = tuple(field.name for field in fields(SummaryOptions))
"""The names of what a user asks: torch.compile follows a look at them, but not ``asdict``."""


class Sent(NamedTuple):
    """How many bytes one rank sends in a forward and in a backward pass."""

    forward: int
    backward: int


@hashed_once
@dataclass(frozen=True)
class SummaryPlan:
    """Who holds and sees what. ``local``: tokens in the shard of each of the ``ranks``, padding included.

    A block is summarized when some query sees it so: these ``blocks`` are the first ones, and all their tokens are true ones. A
    rank makes a part of every such block that it holds tokens of, in at most ``slots`` slots, the same number on every rank.
    """

    options: SummaryOptions
    ranks: int
    local: int

    @property
    def length(self) -> int:
        """The true global number of tokens."""
        return self.ranks * self.local if self.options.length is None else self.options.length

    @property
    def blocks(self) -> int:
        """How many blocks some query sees as summaries: those before ``first`` of the last query."""
        return max(self.length - 1 - self.options.window, 0) // self.options.block

    @property
    def slots(self) -> int:
        """The most summarized blocks that one rank holds tokens of."""
        starts = [rank * self.local for rank in range(self.ranks)]
        block = self.options.block
        return max(min(-(-(start + self.local) // block), self.blocks) - start // block for start in starts)

    @property
    def holders(self) -> int:
        """The most ranks that hold tokens of one block: blocks begin at all multiples of their common divisor in a shard."""
        block, local = self.options.block, self.local
        latest = local - gcd(block, local)
        return min((latest + block - 1) // local + 1, self.ranks)

    @property
    def near(self) -> Options:
        """The options of the exact part: a window, so that keys make only its hops; extents cut it to whole blocks."""
        reach = self.options.window + self.options.block - 1
        return self.options.exact(sliding_window(reach) if self.blocks else causal())

    @property
    def ring(self) -> RingPlan:
        """The plan of the exact part; ValueError where the length does not fit the shards."""
        lengths: Any = (None, self.options.length)
        return RingPlan("contiguous", self.near.mask, self.ranks, self.local, *lengths)

    def first(self, positions: Any) -> Any:
        """The first position that the queries at these positions (integers or integer arrays) see as a token."""
        most = max(self.length, 1)  # what int32 positions are combined with must be of their size
        block, window = min(self.options.block, most), min(self.options.window, most)
        return clamp(positions - window, 0, self.length) // block * block

    def pooled(self, slot_of: Any, part: Any, rank: Any) -> tuple[Any, Any]:
        """First and end (exclusive), in local indices, of the tokens that ``rank`` pools for a summary.

        ``slot_of``: the slot of its block, ``part``: which of the block's summaries it is. Empty where the slot is.
        """
        block, width = self.options.block, self.options.width
        start = rank * self.local
        of_block = (start // block + slot_of) * block
        of_part = of_block + part * width if self.options.pooling == "mean" else of_block
        here = lambda position: clamp(clamp(position, 0, self.blocks * block) - start, 0, self.local)
        return here(of_part), here(of_part + width)

    def held(self, block: Any, holder: Any) -> tuple[Any, Any]:
        """Where among all ranks' slots, side by side, the part of a block lies that the ``holder``-th of its ranks has made.

        And whether there is such a rank: where there is none, it is the place of the first one's part.
        """
        size, local = self.options.block, self.local
        first = block * size // local
        exists = (first + holder) * local < (block + 1) * size
        rank = first + only_where(exists, holder)
        return rank * self.slots + block - rank * local // size, exists

    def bytes_sent(self, batch: int, kv_heads: int, dims: tuple[int, int], itemsize: int, key_mask: bool = False) -> Sent:
        """How many bytes every rank sends, given (head_dim, v_dim) and the bytes of a number of q, k and v.

        Forward: a shard of k and v, and its key mask as bits, at each hop of the window; a rank's parts of summaries to every
        other rank, each head_dim + v_dim + 1 numbers (one more with a key mask) in the accumulation dtype. Backward: k and v
        again, their gradients in the accumulation dtype at each of these hops and home, and the gradients of the summaries
        back to who made the parts of them. An all-gather and a reduce-scatter are counted as what each other rank gets.
        """
        wide, numbers = max(itemsize, 4), batch * self.local * kv_heads * sum(dims)
        keys = numbers * itemsize + batch * -(-self.local // 8) * key_mask
        hops = self.ring.hops
        home = 1 if self.ring.home else 0
        parts = batch * self.slots * self.options.summaries * kv_heads * (sum(dims) + 1 + key_mask) * wide
        far = parts * (self.ranks - 1) if self.blocks else 0
        return Sent(len(hops) * keys + far, len(hops) * keys + (len(hops) + home) * numbers * wide + far)


def checked(shapes: dict[str, tuple[int, ...]], pool: Given | None, options: SummaryOptions, ranks: int) -> SummaryPlan:
    """The plan of a call, ``shapes`` those of q, k and v; ValueError for arrays that do not go together or with the options."""
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise ValueError(f"{name} must have 4 dimensions [batch, seq_local, heads, dim], got shape {list(shape)}")
        if shape[1] != shapes["q"][1]:
            raise ValueError(
                f"q has {shapes['q'][1]} tokens and {name} has {shape[1]}: summary attention is causal self-attention, so every "
                "rank's q, k and v hold the same tokens, in contiguous layout"
            )
    if options.pooling == "mean":
        if pool is not None:
            raise ValueError('pooling="mean" learns nothing: leave pool out, or pass pooling="attention"')
    else:
        expected = (options.summaries, *shapes["k"][2:])
        if pool is None:
            raise ValueError(
                f'pooling="attention" needs pool, an array [summaries, kv_heads, head_dim] = {list(expected)} (zeros give the '
                'mean); or pass pooling="mean"'
            )
        if pool.shape != expected:
            raise ValueError(
                f"pool must be [summaries, kv_heads, head_dim] = {list(expected)}, got shape {list(pool.shape)}: one query for "
                "every summary and key head"
            )
        if pool.dtype not in DTYPES:
            raise ValueError(f"pool must have a floating dtype, got {pool.dtype}: cast it first")
    plan = SummaryPlan(options, ranks, shapes["q"][1])
    plan.ring  # noqa: B018  what does not fit raises here
    return plan
