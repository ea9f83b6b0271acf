"""The drawing of a RingPlan in a terminal, with rich, and its description in words.

A cell of a sequence is a block of tokens. A drawing shows one rank for each cell. If the same ranks share the tokens of several
neighbouring cells, these cells show the ranks alternately. A cell of a matrix is a block of queries and a block of keys; it is
filled if any query-key pair in it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from ring_attn_core import layouts
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.runs import Band, Run

from ..output_files import check_writable

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
    """A sequence cut into cells of ``block`` tokens. ``cells[c][rank]``: the runs of cell ``c`` on ``rank``; padding is {}."""

    cells: tuple[dict[int, tuple[Run, ...]], ...]
    block: int

    @classmethod
    def of(cls, plan: RingPlan, most: int) -> Axis:
        """Cut the tokens of ``plan`` into at most ``most`` cells."""
        runs = [[Run(start, tokens, stride) for _, tokens, start, stride in held] for held in plan.q_runs]
        return cls.cut(runs, plan.seq_local * plan.ranks, most)

    @classmethod
    def cut(cls, runs: Sequence[Iterable[Run]], tokens: int, most: int) -> Axis:
        """Cut ``tokens`` positions, padding included, into at most ``most`` cells. ``runs``: by rank."""
        block = max(-(-tokens // most), 1)
        cells: tuple[dict[int, tuple[Run, ...]], ...] = tuple({} for _ in range(0, tokens, block))
        for rank, held in enumerate(runs):
            for run in held:
                last = run.start + run.stride * (run.length - 1)
                for c in range(run.start // block, last // block + 1) if run.length else ():
                    part = _within(run, c * block, (c + 1) * block)
                    if part.length:
                        cells[c][rank] = (*cells[c].get(rank, ()), part)
        return cls(cells, block)

    def ranks(self, cell: int) -> list[int]:
        """Return the ranks of a cell, rotated by its index so that neighbouring cells with the same ranks begin differently."""
        ranks = sorted(self.cells[cell])
        first = cell % len(ranks) if ranks else 0
        return ranks[first:] + ranks[:first]


def find_computing(plan: RingPlan, axis: Axis, shift: int) -> list[list[int | None]]:
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
    skipped = max(-((run.start - first) // run.stride), 0)
    return Run(run.start + skipped * run.stride, max(run.length - skipped, 0), run.stride).before(end)


def title(plan: RingPlan) -> str:
    counts = f"{count_in_words(plan.ranks, 'rank')}, {count_in_words(plan.length, 'token')}"
    return f"{plan.layout} layout, {mask_in_words(plan.mask)}, {counts}"


def mask_in_words(band: Band) -> str:
    """Describe a mask, such as ``causal mask with offset 3``, by words or else by the inequality of its band."""
    if band == Band():
        return "full attention"
    if band.lo is not None and band.hi is None:
        return "causal mask" + (f" with offset {-band.lo:,}" if band.lo else "")
    if band.lo is not None and band.hi is not None and band.lo <= 0 <= band.hi:
        return f"window of {band.hi:,} before and {-band.lo:,} after"
    return f"mask {band}"


def travel_in_words(plan: RingPlan) -> str:
    """Describe transfers, with distances in ranks, as ``8 steps at shifts 0 to 7, 7 hops by 1, gradients go home by 1``."""
    shifts, hops = plan.shifts, plan.hops
    if not hops:
        return "1 step, nothing travels"
    at = f"0 to {shifts[-1]}" if len(shifts) > 2 and len(shifts) == shifts[-1] + 1 else _list(shifts)
    by = f"{count_in_words(len(hops), 'hop')} by {hops[0]}" if len(set(hops)) == 1 else f"hops by {_list(hops)}"
    return f"{count_in_words(len(shifts), 'step')} at shifts {at}, {by}, gradients go home by {plan.home}"


def holds(runs: tuple[tuple[int, int, int, int], ...]) -> str:
    """Return a rank's runs (base, length, start, stride) as slices of positions, such as ``0:512, 7680:8192``, or "padding"."""
    kept = [(start, start + stride * (length - 1) + 1, stride) for _, length, start, stride in runs if length]
    slices = [f"{first}:{end}" if stride == 1 else f"{first}:{end}:{stride}" for first, end, stride in kept]
    return ", ".join(slices) or "padding"


def short(pairs: int) -> str:
    """Format a count in at most five characters: ``9999``, ``525k``, ``1.05M``."""
    if pairs < 10_000:
        return str(pairs)
    mantissa, exponent = f"{pairs:.2e}".split("e")
    thousands, rest = divmod(int(exponent), 3)
    if thousands > len("kMGTPE"):
        return f"{pairs:.0e}".replace("+", "")
    return f"{float(mantissa) * 10**rest:.{2 - rest}f}{'kMGTPE'[thousands - 1]}"


def count_in_words(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _list(numbers: tuple[int, ...]) -> str:
    """Format numbers as ``1 and 2`` or ``1 2 3``; more than eight are shortened: ``1 2 3 4 5 6 ... 63``."""
    if len(numbers) == 2:
        return f"{numbers[0]} and {numbers[1]}"
    head = numbers if len(numbers) <= 8 else (*numbers[:6], "...", numbers[-1])
    return " ".join(map(str, head))


_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def draw(plan: RingPlan, width: int = 80) -> RenderableType:
    """Return a rich renderable that draws ``plan`` in ``width`` columns. The fewer columns, the more tokens a cell holds."""
    balance = f"balance {plan.balance:.3f} (most work of a rank over the mean; 1 is perfect)"
    lines = [Text(title(plan), style="bold"), Text(travel_in_words(plan)), Text(balance), Text(), _strip(plan, width), Text()]
    legend = Text("pairs that each rank computes, at each step and in all; share: of the mean", style="dim")
    return Group(*lines, *_matrices(plan, width), _table(plan, width), legend)


def check_picture(path: Path) -> None:
    if path.suffix.lower() != ".svg":
        raise ValueError(f"a plan is drawn as .svg, no longer as .png, got {path.name!r}: end the file name in .svg")
    check_writable(path)


def save(drawing: RenderableType, path: Path, width: int) -> None:
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True, color_system="truecolor", highlight=False)
    console.print(drawing)
    console.save_svg(str(path), title="ring-attn plan", theme=DEFAULT_TERMINAL_THEME)


def rank_cell(rank: int) -> tuple[str, str]:
    return _DIGITS[rank % 36], f"black on {colour(rank)}"


def _strip(plan: RingPlan, width: int) -> Text:
    axis, line = Axis.of(plan, max(width - 24, width // 2)), Text("tokens ")  # 24 columns for the name and the cell size
    for cell, held in enumerate(axis.cells):
        line.append(*(rank_cell(axis.ranks(cell)[0]) if held else ("/", "dim")))
    return line.append(f"  {axis.block:,} a cell" if axis.block > 1 else "", style="dim")


def _matrices(plan: RingPlan, width: int) -> list[Table | Text]:
    """Draw a matrix of queries (down) by keys (across) for each of the first ``STEPS`` ring steps, and a legend.
    A row has four matrices: fewer if one would have less than 10 columns, more if each keeps at least 32."""
    chunks = plan.ranks * layouts.slots(plan.layout)
    across = max(min(4, (width + 2) // 12), (width + 2) // 34, 1)
    side = (width + 2) // across - 2
    most = side // chunks * chunks or side  # whole cells per slot if possible
    axis, grid, drawn = Axis.of(plan, most), Table.grid(padding=(0, 2, 0, 0)), []
    for step, shift in enumerate(plan.shifts[:STEPS]):
        name = f"step {step}, shift {shift}"
        text = Text((name if len(name) <= side else name.replace(", ", "\n")) + "\n", no_wrap=True)
        for line in find_computing(plan, axis, shift):
            for rank in line:
                text.append(*((".", "dim") if rank is None else rank_cell(rank)))
            text.append("\n")
        drawn.append(text)
    for first in range(0, len(drawn), across):
        grid.add_row(*drawn[first : first + across])
    legend = "queries down, keys across; a cell shows the rank that computes it"
    if axis.block > 1:
        block = f"{axis.block:,} x {axis.block:,} tokens"
        legend = f"queries down, keys across; a cell is {block} and shows a rank that computes some of it"
    more = f"... {len(plan.shifts) - STEPS} more steps\n" if len(plan.shifts) > STEPS else ""
    return [grid, Text(more + legend, style="dim")]


def _table(plan: RingPlan, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("rank", no_wrap=True)
    longest = max(len(word) for runs in plan.q_runs for word in holds(runs).split())
    table.add_column("holds", min_width=min(longest, max(width - 24, 0)), overflow="fold")
    shown = plan.shifts[:STEPS]
    steps = [[short(plan.area(rank, shift)) for shift in shown] for rank in range(plan.ranks)]
    widths = [column.min_width or 4 for column in table.columns] + [max(map(len, cells)) for cells in zip(*steps, strict=True)]
    if sum(widths) + len(widths) + 14 > width:
        shown, steps = (), [[]] * plan.ranks  # no room: the sums alone
    for step in range(len(shown)):
        table.add_column(f"{step}", justify="right", no_wrap=True)
    table.add_column("all", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    work = [plan.work(rank) for rank in range(plan.ranks)]
    for rank in range(plan.ranks):
        share = f"{work[rank] * plan.ranks / sum(work):.3f}" if sum(work) else "-"
        number = Text(f" {rank} ", rank_cell(rank)[1])
        table.add_row(number, holds(plan.q_runs[rank]), *steps[rank], short(work[rank]), share)
    return table
