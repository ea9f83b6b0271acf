"""Summary attention as plain data: what each query sees, which ranks pool each block, and the bytes sent.

The attention is exact within a window, and sees earlier tokens as a few summaries of each block. With 12 tokens, ``block=3``,
``window=2`` and one summary a block (# a token seen exactly, -s- a block seen as its summary, . not seen):

    #.. ... ... ...      query 0: first = 0
    ### #.. ... ...      query 3: first = 3 * floor(1 / 3) = 0
    ### ##. ... ...      query 4: first = 3 * floor(2 / 3) = 0
    -s- ### ... ...      query 5: first = 3 * floor(3 / 3) = 3
    -s- -s- ### ...      query 8: first = 3 * floor(6 / 3) = 6

Query i sees exactly the tokens ``first(i) .. i``, with ``first(i) = block * floor(max(i - window, 0) / block)``. So at least the
last ``window + 1`` tokens are exact, and each token before ``first(i)`` is in exactly one summarized block.
``window >= length - 1`` is exact attention.

Both packages merge two parts. The local part (``exact``) is ``ring_attention`` with extents. Each extent is a window that begins
at the first token of a block. The compressed part attends to summaries. Each rank pools its tokens of a block by
``attend_block``, whose queries are the learned vectors ``pool``, or zeros for the mean. One all-gather sends these partial
summaries, as pairs (out, lse), to all ranks. Each rank merges the pairs of each block, weighted by exp(lse), and its own queries
attend to the merged summaries.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import gcd
from typing import Any, NamedTuple

from ..masks import causal, sliding_window
from ..plan.ring import RingPlan
from ..problem.checks import DTYPES, OptionalArray
from ..problem.options import NO_COUNT, Options
from ..records import hash_once
from ..runs import Band, clamp, only_where
from ..validation import hold_numbers, in_words, number_in_words

POOLINGS = ("attention", "mean")


@hash_once
@dataclass(frozen=True, kw_only=True)
class SummaryOptions:
    """The options of a ``summary_attention`` call; the backend's name and the sign of ``length`` are not checked here."""

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
        """Return the options of exact attention with ``mask`` and layout "contiguous"; copy the other values from this object."""
        names = "length", "scale", "softcap", "strategy", "backend", "deterministic"
        return Options(layout="contiguous", mask=mask, **{name: getattr(self, name) for name in names})

    @property
    def width(self) -> int:
        """Number of tokens pooled into one summary: a whole block, or with mean pooling an equal part of the block."""
        return self.block // self.summaries if self.pooling == "mean" else self.block

    @property
    def stands_for(self) -> float:
        """Number n of tokens that one summary represents, masked tokens included; log n is added to the summary's scores."""
        return self.block / self.summaries

    @property
    def compared(self) -> tuple[tuple[str, Any], ...]:
        """Pairs (name, value) of all options. Ranks compare them to check that all ranks passed the same options."""
        return tuple([(name, getattr(self, name)) for name in OPTION_NAMES])


OPTION_NAMES = tuple(field.name for field in fields(SummaryOptions))
"""The names of the options. torch.compile can trace attribute lookups by these names, but not ``asdict``."""


class SummaryInputs(NamedTuple):
    """The arrays of a ``summary_attention`` call, under their public names."""

    q: Any
    k: Any
    v: Any
    pool: Any
    key_mask: Any


class Summaries(NamedTuple):
    """The n summaries by block: ``k`` [b n g d], ``v`` [b n g e], ``fraction`` [b n] of unmasked tokens or None."""

    k: Any
    v: Any
    fraction: Any


class SentBytes(NamedTuple):
    """Bytes that one rank sends in a forward pass and in a backward pass."""

    forward: int
    backward: int


@hash_once
@dataclass(frozen=True)
class SummaryPlan:
    """The plan of summary attention over a ring. ``local``: tokens of a shard, padding included.
    Some query sees the first ``blocks`` blocks, which hold no padding, as summaries. Each of a rank's ``slots`` slots holds its
    partial summaries of one block, made from its own tokens."""

    options: SummaryOptions
    ranks: int
    local: int

    @property
    def length(self) -> int:
        return self.ranks * self.local if self.options.length is None else self.options.length

    @property
    def blocks(self) -> int:
        """Number of blocks that the last query sees as summaries. No query sees more, so only these blocks are summarized."""
        return max(self.length - 1 - self.options.window, 0) // self.options.block

    @property
    def slots(self) -> int:
        """The largest number of summarized blocks that overlap one rank's shard."""
        starts = [rank * self.local for rank in range(self.ranks)]
        block = self.options.block
        return max(min(-(-(start + self.local) // block), self.blocks) - start // block for start in starts)

    @property
    def owners(self) -> int:
        """The largest number of ranks that a block may span.
        Blocks start in a shard at multiples of ``gcd(block, local)``; one at the last spans the most ranks."""
        block, local = self.options.block, self.local
        latest = local - gcd(block, local)
        return min((latest + block - 1) // local + 1, self.ranks)

    @property
    def exact_options(self) -> Options:
        """Options of exact attention: a window that extents narrow to a block's start; causal without summarized blocks."""
        reach = self.options.window + self.options.block - 1
        return self.options.exact(sliding_window(reach) if self.blocks else causal())

    @property
    def ring(self) -> RingPlan:
        """The ring plan of attention to the exactly seen tokens. Raise ValueError if ``length`` does not fit the shards."""
        lengths: Any = (None, self.options.length)
        return RingPlan("contiguous", self.exact_options.mask, self.ranks, self.local, *lengths)

    def first(self, positions: Any) -> Any:
        """Return the first position that each query sees exactly. ``positions``: of the queries, an int or integer array."""
        most = max(self.length, 1)  # values combined with int32 positions must fit int32
        block, window = min(self.options.block, most), min(self.options.window, most)
        return clamp(positions - window, 0, self.length) // block * block

    def pooled(self, slot_of: Any, index: Any, rank: Any) -> tuple[Any, Any]:
        """Return (first, end): ``rank`` pools its local tokens ``first .. end - 1`` for summary ``index`` of the block in a slot.
        The interval is empty if the slot holds no block."""
        block, width = self.options.block, self.options.width
        start = rank * self.local
        block_start = (start // block + slot_of) * block
        summary_start = block_start + index * width if self.options.pooling == "mean" else block_start
        here = lambda position: clamp(clamp(position, 0, self.blocks * block) - start, 0, self.local)
        return here(summary_start), here(summary_start + width)

    def held(self, block: Any, owner: Any) -> tuple[Any, Any]:
        """Return (slot, exists): the slot of ``block`` on one rank, counted over all ranks, and whether the rank has the block.
        ``owner``: 0 is the first rank with tokens of the block. If there are too few ranks, the slot is that of the first."""
        size, local = self.options.block, self.local
        first = block * size // local
        exists = (first + owner) * local < (block + 1) * size
        rank = first + only_where(exists, owner)
        return rank * self.slots + block - rank * local // size, exists

    def bytes_sent(self, batch: int, kv_heads: int, dims: tuple[int, int], itemsize: int, key_mask: bool = False) -> SentBytes:
        """Return the bytes that each rank sends with the strategy "ring": shards at each hop, and partial summaries in an
        all-gather. A backward also sends the gradients, with one more hop, and a reduce-scatter. ``dims``: (head_dim, v_dim)."""
        wide, numbers = max(itemsize, 4), batch * self.local * kv_heads * sum(dims)
        keys = numbers * itemsize + batch * -(-self.local // 8) * key_mask
        hops = self.ring.hops
        home = 1 if self.ring.home else 0
        parts = batch * self.slots * self.options.summaries * kv_heads * (sum(dims) + 1 + key_mask) * wide
        summaries = parts * (self.ranks - 1) if self.blocks else 0
        return SentBytes(len(hops) * keys + summaries, len(hops) * keys + (len(hops) + home) * numbers * wide + summaries)


def plan_call(shapes: dict[str, tuple[int, ...]], pool: OptionalArray | None, options: SummaryOptions, ranks: int) -> SummaryPlan:
    """Return the plan of a call. ``shapes``: of q, k and v. ``pool``: shape and dtype of the pooling's queries, or None."""
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
    plan.ring  # noqa: B018  raises if the length does not fit
    return plan
