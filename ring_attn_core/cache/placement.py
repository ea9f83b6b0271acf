"""Which rank holds which token of a growing sequence: integers only, the same on every rank, so that nobody has to ask.

What the ring's prefill computes stays where the layout has it. Every token after that goes to the rank that holds the fewest of
its request, the lowest of several. A rank fills its slots in order of position, so the tokens of a sequence that is cut short are
the last ones of every rank. With counts (5, 3, 4) the next ones go to

    rank 0          6th 8th         a column is a rank's new slot; read along the levels 3, 4, 5, ... and within
    rank 1   1. 2.  4.  ...         a level by rank: that is the order of the tokens
    rank 2      3.  5.  ...

for the rank with the fewest tokens is the one whose next slot has the lowest level, and the lowest rank of these. So the number
of tokens that come before slot ``level`` of ``rank`` needs no loop over tokens:

    turn(rank, level) = sum over ranks r of max(0, level + [r < rank] - counts[r])

``place`` is the truth, one token at a time; ``turns`` the arithmetic that both frameworks run on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layouts import check_ranks, named, padded_local
from ..runs import Run


def place(counts: Sequence[int], tokens: int) -> list[int]:
    """Return the rank of each of ``tokens`` more tokens of a request of which the ranks hold ``counts``."""
    held, ranks = list(counts), []
    for _ in range(tokens):
        rank = held.index(min(held))
        held[rank] += 1
        ranks.append(rank)
    return ranks


def earlier(ranks: int) -> list[list[int]]:
    """Return [rank][other]: 1 where ``other`` comes first of two ranks that hold equally many tokens."""
    check_ranks(ranks)
    return [[int(other < rank) for other in range(ranks)] for rank in range(ranks)]


def turns(counts: Any, levels: Any, earlier: Any) -> Any:
    """Return [batch, ranks, slots]: how many tokens are appended before that of each slot.

    ``counts`` [batch, ranks], ``levels`` [batch, ranks, slots], which slots of a rank, counted from 0, none below its count;
    ``earlier`` [ranks, ranks] as above. Arrays of numpy, torch or jnp.
    """
    return (levels[..., None] + earlier[None, :, None, :] - counts[:, None, None, :]).clip(0).sum(-1)


def positions(layout: str, ranks: int, local: int) -> list[list[int]]:
    """Return [ranks][local]: where every token of a chunk stands in it, by the shards of ``layout``; they increase in a shard.

    Raises ValueError where the layout cannot cut shards of ``local`` tokens.
    """
    return [[position for run in of_rank for position in run.positions()] for of_rank in _runs(layout, ranks, local)]


def _runs(layout: str, ranks: int, local: int) -> list[tuple[Run, ...]]:
    """The runs of every rank; ValueError as ``positions`` raises it."""
    check_ranks(ranks)
    runs = [named(layout)(rank, ranks, local) for rank in range(ranks)]
    if len(runs[0]) * runs[0][0].length != local:
        raise ValueError(
            f"{layout} over {ranks} ranks needs an even number of tokens a rank, got {local}: shard with to_layout, which pads "
            f"to {padded_local(layout, ranks, local * ranks)} a rank"
        )
    return runs


def owners(layout: str, ranks: int, local: int) -> list[int]:
    """Return the rank of every position of a chunk that is sharded in ``layout``."""
    of_position = {p: rank for rank, shard in enumerate(positions(layout, ranks, local)) for p in shard}
    return [of_position[p] for p in range(ranks * local)]


def held(layout: str, ranks: int, local: int, length: int) -> list[int]:
    """Return how many of the first ``length`` tokens of a chunk each rank holds: they come first in its shard."""
    return [sum(run.before(length).length for run in of_rank) for of_rank in _runs(layout, ranks, local)]
