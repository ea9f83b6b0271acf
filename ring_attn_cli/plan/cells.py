"""The data of a plan's drawings: sequences cut into cells, the ranks that hold each cell, and the pairs that the ranks compute.

A cell of a sequence is a block of tokens. A drawing shows one rank for each cell. If the same ranks share the tokens of several
neighbouring cells, these cells show the ranks alternately. A cell of a matrix is a block of queries and a block of keys; it is
filled if any query-key pair in it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.runs import Run

STEPS = 8
"""Largest number of steps that a drawing shows. The drawing says how many more steps the plan has."""


_COLOURS = ("#4C78A8", "#F58518", "#54A24B", "#E45756", "#B279A2", "#EECA3B", "#72B7B2", "#9D755D")


def colour(rank: int) -> str:
    """Return the colour of a rank, ``#rrggbb``, the same in every picture: eight colours, then eight paler ones, repeated."""
    base = _COLOURS[rank % 8]
    if rank // 8 % 2 == 0:
        return base
    return "#" + "".join(f"{(255 + int(base[i : i + 2], 16)) // 2:02X}" for i in (1, 3, 5))


@dataclass(frozen=True)
class Axis:
    """One sequence cut into cells of ``block`` tokens.
    ``cells[c][rank]``: the runs of cell ``c`` on ``rank``; padding is {}."""

    cells: tuple[dict[int, tuple[Run, ...]], ...]
    block: int

    @classmethod
    def of(cls, plan: RingPlan, most: int) -> Axis:
        """Cut the tokens of ``plan`` into at most ``most`` cells."""
        held = plan.seq_local * plan.ranks
        block = max(-(-held // most), 1)
        cells: tuple[dict[int, tuple[Run, ...]], ...] = tuple({} for _ in range(0, held, block))
        for rank, runs in enumerate(plan.q_runs):
            for _, tokens, start, stride in runs:
                run = Run(start, tokens, stride)
                for c in range(start // block, -(-(start + stride * tokens) // block) if tokens else 0):
                    part = _within(run, c * block, (c + 1) * block)
                    if part.length:
                        cells[c][rank] = (*cells[c].get(rank, ()), part)
        return cls(cells, block)

    def ranks(self, cell: int) -> list[int]:
        """Return the ranks of a cell, rotated by its index so that neighbouring cells with the same ranks begin differently."""
        ranks = sorted(self.cells[cell])
        first = cell % len(ranks) if ranks else 0
        return ranks[first:] + ranks[:first]


def computed(plan: RingPlan, axis: Axis, shift: int) -> list[list[int | None]]:
    """Return for [query cell][key cell] a rank, or None, that computes pairs with the keys of rank ``(rank - shift) % ranks``."""
    band, lo, hi = plan.mask, plan.mask.lo, plan.mask.hi
    cells = range(len(axis.cells))
    sources = [[(rank, (rank - shift) % plan.ranks) for rank in axis.ranks(a)] for a in cells]

    def cell(a: int, b: int) -> int | None:
        lag = (a - b) * axis.block
        if (lo is not None and lag + axis.block - 1 < lo) or (hi is not None and lag - axis.block + 1 > hi):
            return None
        for rank, source in sources[a]:
            for k in axis.cells[b].get(source, ()):
                if any(band.onto(q, k).area(q.length, k.length) for q in axis.cells[a][rank]):
                    return rank
        return None

    return [[cell(a, b) for b in cells] for a in cells]


def _within(run: Run, first: int, end: int) -> Run:
    """Return the part of ``run`` with positions in ``first .. end - 1``."""
    skipped = max(-((run.start - first) // run.stride), 0)
    return Run(run.start + skipped * run.stride, max(run.length - skipped, 0), run.stride).before(end)
