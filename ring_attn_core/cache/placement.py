"""Assignment of a growing sequence's tokens to ranks by integer arithmetic, the same on each rank without communication.

Prefilled tokens stay where the layout puts them. Each later token goes to the rank with the fewest tokens of its request; the
lowest rank wins a tie. A rank fills its slots in order of position, so truncating a sequence removes the last tokens of each
rank. For example, if three ranks hold 5, 3 and 4 tokens of a request (``counts = (5, 3, 4)``), the next tokens go to these slots:

    slot      3    4    5    6
    rank 0              4th  7th      new tokens come in order of slot index, then of rank
    rank 1    1st  2nd  5th  8th
    rank 2         3rd  6th  9th

The rank with the fewest tokens always has the empty slot of the lowest index. Therefore the rank and the slot of a token
determine its *append index*, the number of tokens appended before it, without a loop over tokens:

    append_index(rank, slot) = sum over ranks r of max(0, slot + [r < rank] - counts[r])

``[r < rank]`` is 1 if r < rank, else 0. ``place`` is the reference implementation, one token at a time. Both frameworks run the
arithmetic of ``append_indices`` on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layouts import check_ranks, find_layout, padded_local
from ..runs import Run


def place(counts: Sequence[int], tokens: int) -> list[int]:
    """Return the rank of each of a request's next ``tokens`` tokens. ``counts``: number of the request's tokens on each rank."""
    held, ranks = list(counts), []
    for _ in range(tokens):
        rank = held.index(min(held))
        held[rank] += 1
        ranks.append(rank)
    return ranks


def earlier(ranks: int) -> list[list[int]]:
    """Return the tie-break table [rank][other]: 1 if ``other`` gets a token before ``rank`` at equal counts, else 0."""
    check_ranks(ranks)
    return [[int(other < rank) for other in range(ranks)] for rank in range(ranks)]


def append_indices(counts: Any, slot_indices: Any, earlier: Any) -> Any:
    """Return for each empty slot, [batch, ranks, slots], the number of tokens appended before the slot is taken.
    ``counts`` [batch, ranks], ``slot_indices`` [batch, ranks, slots], ``earlier`` [ranks, ranks]: integers of any framework."""
    return (slot_indices[..., None] + earlier[None, :, None, :] - counts[:, None, None, :]).clip(0).sum(-1)


def count_removed(lengths: Any, keep: Any, owners: Any, slots: Any, ranks: Any) -> Any:
    """Return the number of each rank's tokens, [batch, ranks], at positions ``keep`` [batch] to ``lengths`` [batch].
    ``owners`` [batch, n]: a ring buffer of the ranks of the newest n tokens. ``slots``, ``ranks``: 0 .. n - 1, 0 .. ranks - 1."""
    last = lengths[:, None] - 1
    position = last - (last - slots[None]) % len(slots)  # the newest position recorded in that entry
    gone = (position >= keep[:, None]) & (position >= 0)
    return (gone[..., None] & (owners[..., None] == ranks[None, None])).sum(1, dtype=lengths.dtype)


def positions(layout: str, ranks: int, local: int) -> list[list[int]]:
    """Return the positions of each rank's tokens in a chunk, [ranks][local], in increasing order."""
    return [[position for run in runs for position in run.positions()] for runs in _runs(layout, ranks, local)]


def _runs(layout: str, ranks: int, local: int) -> list[tuple[Run, ...]]:
    """Return each rank's runs (progressions of positions). Raise ValueError if the layout has no shards of ``local`` tokens."""
    check_ranks(ranks)
    runs = [find_layout(layout)(rank, ranks, local) for rank in range(ranks)]
    if len(runs[0]) * runs[0][0].length != local:
        raise ValueError(
            f"{layout} over {ranks} ranks needs an even number of tokens a rank, got {local}: shard with to_layout, which pads "
            f"to {padded_local(layout, ranks, local * ranks)} a rank"
        )
    return runs


def owners(layout: str, ranks: int, local: int) -> list[int]:
    """Return, for each position of a chunk of ``ranks * local`` tokens, the rank that holds it."""
    owner = {p: rank for rank, shard in enumerate(positions(layout, ranks, local)) for p in shard}
    return [owner[p] for p in range(ranks * local)]


def count_held(layout: str, ranks: int, local: int, length: int) -> list[int]:
    """Count the tokens of each rank among the first ``length`` tokens of a chunk; they are the first ones of its shard."""
    return [sum(run.before(length).length for run in runs) for runs in _runs(layout, ranks, local)]
