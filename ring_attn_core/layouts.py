"""Sequence layouts: the token positions that each rank holds, as a few runs of equal length.

With 16 tokens over 4 ranks:

    contiguous   rank 0:  0  1  2  3    rank 1:  4  5  6  7    rank 2:  8  9 10 11    rank 3: 12 13 14 15
    striped      rank 0:  0  4  8 12    rank 1:  1  5  9 13    rank 2:  2  6 10 14    rank 3:  3  7 11 15
    zigzag       rank 0:  0  1 14 15    rank 1:  2  3 12 13    rank 2:  4  5 10 11    rank 3:  6  7  8  9

Under a causal mask, contiguous gives the last rank up to twice the mean work; striped and zigzag balance the work. Striped is
from Brandon et al., "Striped Attention" (arXiv:2311.09431); Llama 3 was trained with zigzag (arXiv:2407.21783,
section 3.3.2).

If the tokens do not fill the shards (``padded_local``), the last positions are padding. Padding is *blank* (plan/ring.py): a
padded query sees no key, and no query sees a padded key. A cache has *empty* slots instead, at position -1
(inference/requests.py of both packages).
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

from .runs import Run
from .validation import as_number, in_words, is_integer

Layout = Callable[[int, int, int], tuple[Run, ...]]


def contiguous(rank: int, ranks: int, seq_local: int) -> tuple[Run, ...]:
    return (Run(rank * seq_local, seq_local),)


def striped(rank: int, ranks: int, seq_local: int) -> tuple[Run, ...]:
    return (Run(rank, seq_local, ranks),)


def zigzag(rank: int, ranks: int, seq_local: int) -> tuple[Run, ...]:
    chunk = seq_local // 2
    return (Run(rank * chunk, chunk), Run((2 * ranks - 1 - rank) * chunk, chunk))


LAYOUTS: dict[str, Layout] = {"contiguous": contiguous, "striped": striped, "zigzag": zigzag}
"""The layouts by name. Each maps (rank, ranks, tokens of a shard) to the runs that the rank holds."""


def slots(layout: object) -> int:
    """Return the number of slots: the equal parts of a shard, each of which holds one run of positions in ``layout``."""
    return len(find_layout(layout)(0, 1, 0))


def padded_local(layout: object, ranks: int, length: int) -> int:
    """Return the smallest shard size in tokens, a multiple of the layout's runs, that holds ``length`` over ``ranks``."""
    runs = slots(layout)
    check_ranks(ranks)
    check_length(length)
    return -(-length // (ranks * runs)) * runs


def check_ranks(ranks: object) -> None:
    """Raise ValueError if ``ranks`` is not an integer of at least 1."""
    if not is_integer(ranks):
        raise ValueError(f"ranks must be an int, how many members the ring has, got {in_words(ranks)}")
    if ranks < 1:  # type: ignore[operator]
        raise ValueError(f"a ring needs at least 1 rank, got {ranks}")


def check_length(length: object) -> None:
    if not is_integer(length) or length < 0:  # type: ignore[operator]
        raise ValueError(
            "length is the true global number of tokens, an int of at least 0 (static under jit), got " + in_words(length)
        )


class ShardLength(int):
    """The global tokens, layout and ranks of a shard, compared together, so ``jax.jit`` traces anew for another ring."""

    layout: Any
    ranks: int

    def __new__(cls, length: int, layout: Any, ranks: int) -> ShardLength:
        self = super().__new__(cls, length)
        self.layout, self.ranks = layout, ranks
        return self

    def __getnewargs__(self) -> Any:
        return int(self), self.layout, self.ranks

    def __eq__(self, other: object) -> bool:
        alike = not isinstance(other, ShardLength) or (self.layout, self.ranks) == (other.layout, other.ranks)
        return alike and int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def plain_length(length: Any, layout: Any, ranks: int) -> Any:
    """Return ``length`` as an int, after a check that its shard was made for this layout and number of ranks."""
    if not isinstance(length, ShardLength):
        return length
    named_or_made = isinstance(layout, str) or hasattr(layout, "runs")
    if length.ranks != ranks or (ranks > 1 and named_or_made and length.layout != layout):
        raise ValueError(
            f"these shards were made for {length.ranks} ranks in the layout {length.layout}, and this ring has {ranks} in "
            f"{layout}: shard for this ring, or pass the mesh axis and the layout of the shards (shard.layout for a balanced one)"
        )
    return int(length)


def check_rank(rank: object, ranks: int) -> None:
    """Check that ``rank`` is an integer from 0 to ``ranks - 1``; of a traced rank check only the type."""
    check_ranks(ranks)
    if not is_integer(rank):
        raise ValueError(f"rank must be an int, 0 to {ranks - 1}, got {in_words(rank)}")
    if isinstance(rank, Integral) and not 0 <= int(rank) < ranks:
        raise ValueError(f"rank={rank} is not one of {ranks} ranks: pass 0 to {ranks - 1}")


def check_pad_value(pad_value: Any, bounds: tuple[int, int] | None) -> None:
    """Check that ``pad_value`` is an integer within ``bounds`` (least and greatest of an integer dtype, or None); skip arrays."""
    value = as_number(pad_value)
    if bounds is None or not isinstance(value, int | float | complex):
        return
    low, high = bounds
    if isinstance(value, complex) or not low <= value <= high or value != int(value):
        raise ValueError(
            f"pad_value={value} does not fit x, whose dtype holds integers from {low} to {high}: pass one of these, or cast x"
        )


def check_padded(tokens: int, padded: int, where: str) -> None:
    """Check that an array for ``from_layout`` has as many tokens as ``to_layout`` returns. ``where``: goes into the error."""
    if tokens != padded:
        raise ValueError(f"from_layout expects {padded} tokens {where}, got {tokens}: pass the length that to_layout was given")


def find_layout(layout: object) -> Layout:
    if layout == "balanced" or hasattr(layout, "runs"):
        raise ValueError(
            f"a balanced layout follows from documents, and this call takes one of {', '.join(LAYOUTS)}. ring_attention, "
            'to_layout and from_layout take the .layout of shard_batch(..., layout="balanced")'
        )
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: choose one of {', '.join(LAYOUTS)}")
    return LAYOUTS[layout]


def gathered_length(shape: tuple[int, ...], layout: Any, ranks: int, length: object) -> int:
    """Return the global number of tokens: ``length`` or, if None, that of the balanced layout or the sum of all shards."""
    length = plain_length(length, layout, ranks)
    if len(shape) < 2:
        raise ValueError(f"x must be this rank's shard [batch, tokens, ...], got shape {list(shape)}")
    if balanced := hasattr(layout, "seq_local"):
        held = layout.length if length is None else length
        layout.check(ranks, held)
    else:
        held = shape[1] * ranks if length is None else length
    local = layout.seq_local if balanced else padded_local(layout, ranks, held)  # type: ignore[arg-type]
    if local != shape[1]:
        raise ValueError(
            f"x holds {shape[1]} tokens, and of length={held} over {ranks} ranks in {layout} a shard has {local}: pass the "
            "length that the sequence had before it was sharded"
        )
    return held  # type: ignore[return-value]


def token_position(position: object, length: int) -> int:
    """Return ``position`` as a nonnegative index; a negative one counts from the end, as in Python."""
    if not is_integer(position) or not -length <= position < length:  # type: ignore[operator]
        raise ValueError(
            f"position must be an int from {-length} to {length - 1}, or integers [batch], one for each row, got "
            + in_words(position)
        )
    return int(position) % length  # type: ignore[call-overload]
