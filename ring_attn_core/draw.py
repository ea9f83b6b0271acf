"""A plan as a picture: who holds which tokens, who computes what at each step, and how the work is shared.

:func:`terminal` draws it with rich, :func:`save` as PNG or SVG with matplotlib (``draw_image.py``); each is imported at
the call. A long sequence is drawn in blocks of tokens: a cell is filled where anything in its block is computed, and where
several ranks share a block, neighbouring cells show different ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import layouts
from .plan import RingPlan
from .runs import Band, Run

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

STEPS = 8
"""How many steps a picture shows; the rest are counted."""

_COLOURS = ("#4C78A8", "#F58518", "#54A24B", "#E45756", "#B279A2", "#EECA3B", "#72B7B2", "#9D755D")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def colour(rank: int) -> str:
    """The colour of a rank, ``#rrggbb``, the same in every picture: eight, then eight paler, then from the start."""
    base = _COLOURS[rank % 8]
    if rank // 8 % 2 == 0:
        return base
    return "#" + "".join(f"{(int(base[i : i + 2], 16) + 255) // 2:02X}" for i in (1, 3, 5))


@dataclass(frozen=True)
class Axis:
    """One sequence cut into cells of ``block`` tokens: ``cells[c][rank]`` are the runs that a rank holds of cell ``c``.

    ``length`` tokens of the ``held`` are no padding; a cell of padding alone holds nothing.
    """

    cells: tuple[dict[int, tuple[Run, ...]], ...]
    block: int
    length: int
    held: int

    @classmethod
    def of(cls, plan: RingPlan, most: int, *, keys: bool) -> Axis:
        """The queries or keys of ``plan`` in at most ``most`` cells."""
        length, held = (plan.kv_length, plan.kv_local * plan.ranks) if keys else (plan.length, plan.seq_local * plan.ranks)
        block = max(-(-held // most), 1)
        cells: tuple[dict[int, tuple[Run, ...]], ...] = tuple({} for _ in range(0, held, block))
        for rank, runs in enumerate(plan.k_runs if keys else plan.q_runs):
            for _, tokens, start, stride in runs:
                run = Run(start, tokens, stride)
                for c in range(start // block, -(-(start + stride * tokens) // block) if tokens else 0):
                    part = _within(run, c * block, (c + 1) * block)
                    if part.length:
                        cells[c][rank] = (*cells[c].get(rank, ()), part)
        return cls(cells, block, length, held)

    def ranks(self, cell: int) -> list[int]:
        """Who holds tokens of this cell, beginning with another rank from cell to cell; none where it is padding."""
        ranks = sorted(self.cells[cell])
        first = cell % len(ranks) if ranks else 0
        return ranks[first:] + ranks[:first]


def computed(plan: RingPlan, queries: Axis, keys: Axis, shift: int) -> list[list[int | None]]:
    """``[queries][keys]``: a rank that computes pairs of this cell at ``shift``, None where no rank does."""
    band, lo, hi = plan.mask, plan.mask.lo, plan.mask.hi
    sources = [[(rank, (rank - shift) % plan.ranks) for rank in queries.ranks(a)] for a in range(len(queries.cells))]

    def cell(a: int, b: int) -> int | None:
        least, most = a * queries.block - (b + 1) * keys.block + 1, (a + 1) * queries.block - 1 - b * keys.block
        if (lo is not None and most < lo) or (hi is not None and least > hi):
            return None
        for rank, source in sources[a]:
            for k in keys.cells[b].get(source, ()):
                if any(band.onto(q, k).area(q.length, k.length) for q in queries.cells[a][rank]):
                    return rank
        return None

    return [[cell(a, b) for b in range(len(keys.cells))] for a in range(len(queries.cells))]


def _within(run: Run, first: int, end: int) -> Run:
    """The part of ``run`` whose positions lie in ``first .. end - 1``."""
    skipped = max(-((run.start - first) // run.stride), 0)
    return Run(run.start + skipped * run.stride, max(run.length - skipped, 0), run.stride).before(end)


def self_attention(plan: RingPlan) -> bool:
    """Whether queries and keys are the same tokens, so that one strip and one column show both."""
    return (plan.kv_local, plan.kv_length) == (plan.seq_local, plan.length)


def title(plan: RingPlan) -> str:
    """Layout, mask, ranks and lengths in one line."""
    tokens = _count(plan.length, "token")
    if not self_attention(plan):
        tokens = f"{_count(plan.length, 'query')}, {_count(plan.kv_length, 'key')}"
    return f"{plan.layout} layout, {mask_in_words(plan.mask)}, {_count(plan.ranks, 'rank')}, {tokens}"


def mask_in_words(band: Band) -> str:
    """``causal mask``, ``window of 1,024 before and 0 after``; the inequality itself where no short words fit."""
    if band == Band():
        return "full attention"
    if band.lo is not None and band.hi is None:
        return "causal mask" + (f" with offset {-band.lo:,}" if band.lo else "")
    if band.lo is not None and band.hi is not None and band.lo <= 0 <= band.hi:
        return f"window of {band.hi:,} before and {-band.lo:,} after"
    return f"mask {band}"


def travel_in_words(plan: RingPlan) -> str:
    """Steps, shifts, hops and the way home: ``8 steps at shifts 0 to 7, 7 hops by 1, gradients go home by 1``."""
    shifts, hops = plan.shifts, plan.hops
    if not hops:
        return "1 step, nothing travels"
    at = f"0 to {shifts[-1]}" if len(shifts) > 2 and len(shifts) == shifts[-1] + 1 else _listed(shifts)
    by = f"{_count(len(hops), 'hop')} by {hops[0]}" if len(set(hops)) == 1 else f"hops by {_listed(hops)}"
    return f"{_count(len(shifts), 'step')} at shifts {at}, {by}, gradients go home by {plan.home}"


def holds(runs: tuple[tuple[int, int, int, int], ...]) -> str:
    """Runs ``(base, length, start, stride)`` as Python slices of positions, without padding: ``0:512, 7680:8192``."""
    kept = [(start, start + stride * (length - 1) + 1, stride) for _, length, start, stride in runs if length]
    slices = [f"{first}:{end}" if stride == 1 else f"{first}:{end}:{stride}" for first, end, stride in kept]
    return ", ".join(slices) or "padding"


def short(pairs: int) -> str:
    """A count in at most five characters: ``9999``, ``525k``, ``1.05M``."""
    if pairs < 10_000:
        return str(pairs)
    mantissa, exponent = f"{pairs:.2e}".split("e")
    thousands, rest = divmod(int(exponent), 3)
    return f"{float(mantissa) * 10**rest:.{2 - rest}f}{'kMGTPE'[thousands - 1]}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else {'query': 'queries'}.get(noun, noun + 's')}"


def _listed(numbers: tuple[int, ...]) -> str:
    """``1 and 2``, ``1 2 3``; a long one is cut: ``1 2 3 4 5 6 ... 63``."""
    if len(numbers) == 2:
        return f"{numbers[0]} and {numbers[1]}"
    head = numbers if len(numbers) <= 8 else (*numbers[:6], "...", numbers[-1])
    return " ".join(map(str, head))


def save(plan: RingPlan, path: str | Path) -> None:
    """Write the picture of ``plan`` to ``path``, PNG or SVG by its suffix; ValueError for any other."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".png", ".svg"):
        raise ValueError(f"a plan is drawn as .png or .svg, got {path.name!r}: end the file name in one of these two")
    from .draw_image import write

    write(plan, path, suffix[1:])


def terminal(plan: RingPlan) -> RenderableType:
    """The picture of ``plan`` as something that rich prints, 80 columns wide."""
    from rich.console import Group
    from rich.text import Text

    balance = f"balance {plan.balance:.3f} (most work of a rank over the mean; 1 is perfect)"
    lines = [Text(title(plan), style="bold"), Text(travel_in_words(plan)), Text(balance), Text(), *_strips(plan), Text()]
    legend = Text("pairs that each rank computes, at each step and in all; share: of the mean", style="dim")
    return Group(*lines, *_matrices(plan), _table(plan), legend)


def _cell(rank: int) -> tuple[str, str]:
    return _DIGITS[rank % 36], f"black on {colour(rank)}"


def _strips(plan: RingPlan) -> list[Text]:
    """Which rank holds which positions: one line, or one for queries and one for keys where they differ."""
    from rich.text import Text

    lines = []
    for name, keys in (("tokens ", False),) if self_attention(plan) else (("queries ", False), ("keys    ", True)):
        axis = Axis.of(plan, 56, keys=keys)
        line = Text(name)
        for cell in range(len(axis.cells)):
            line.append(*(_cell(axis.ranks(cell)[0]) if axis.cells[cell] else ("/", "dim")))
        line.append(f"  {axis.block:,} a cell" if axis.block > 1 else "", style="dim")
        lines.append(line)
    return lines


def _matrices(plan: RingPlan) -> list[Table | Text]:
    """Queries down, keys across, one matrix a step, four in a row, and what they show in words."""
    from rich.table import Table
    from rich.text import Text

    chunks = plan.ranks * layouts.slots(plan.layout)
    most = 18 // chunks * chunks or 18  # where it can be, a rank's chunk is a whole number of cells
    queries, keys = Axis.of(plan, most, keys=False), Axis.of(plan, most, keys=True)
    grid = Table.grid(padding=(0, 2, 0, 0))
    drawn = []
    for step, shift in enumerate(plan.shifts[:STEPS]):
        text = Text(f"step {step}, shift {shift}\n", no_wrap=True)
        for line in computed(plan, queries, keys, shift):
            for rank in line:
                text.append(*((".", "dim") if rank is None else _cell(rank)))
            text.append("\n")
        drawn.append(text)
    for first in range(0, len(drawn), 4):
        grid.add_row(*drawn[first : first + 4])
    legend = "queries down, keys across; a cell shows the rank that computes it"
    if queries.block > 1 or keys.block > 1:
        block = f"{queries.block:,} x {keys.block:,} tokens"
        legend = f"queries down, keys across; a cell is {block} and shows a rank that computes some of it"
    more = f"... {len(plan.shifts) - STEPS} more steps\n" if len(plan.shifts) > STEPS else ""
    return [grid, Text(more + legend, style="dim")]


def _table(plan: RingPlan) -> Table:
    """What each rank holds and how many pairs it computes."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("rank", no_wrap=True)
    sides = [plan.q_runs] if self_attention(plan) else [plan.q_runs, plan.k_runs]
    for name, runs in zip(["holds"] if len(sides) == 1 else ["queries", "keys"], sides, strict=True):
        table.add_column(name, min_width=max(len(word) for rank in runs for word in holds(rank).split()))
    shown = plan.shifts[:STEPS]
    steps = [[short(plan.area(rank, shift)) for shift in shown] for rank in range(plan.ranks)]
    widths = [column.min_width or 4 for column in table.columns] + [max(map(len, cells)) for cells in zip(*steps, strict=True)]
    if sum(widths) + len(widths) + 14 > 80:
        shown, steps = (), [[]] * plan.ranks  # no room: the sums alone
    for step in range(len(shown)):
        table.add_column(f"{step}", justify="right", no_wrap=True)
    table.add_column("all", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    work = [plan.work(rank) for rank in range(plan.ranks)]
    for rank in range(plan.ranks):
        share = f"{work[rank] * plan.ranks / sum(work):.3f}" if sum(work) else "-"
        table.add_row(
            Text(f" {rank} ", _cell(rank)[1]), *(holds(runs[rank]) for runs in sides), *steps[rank], short(work[rank]), share
        )
    return table
