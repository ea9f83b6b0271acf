"""The drawing of a RingPlan in a terminal, with rich."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from ring_attn_core import layouts
from ring_attn_core.plan.ring import RingPlan

from ..output_files import check_writable
from .cells import STEPS, Axis, colour, computed
from .words import holds, short, title, travel_in_words

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
    """Write a drawing of ``width`` columns as SVG."""
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True, color_system="truecolor", highlight=False)
    console.print(drawing)
    console.save_svg(str(path), title="ring-attn plan", theme=DEFAULT_TERMINAL_THEME)


def rank_cell(rank: int) -> tuple[str, str]:
    return _DIGITS[rank % 36], f"black on {colour(rank)}"


def _strip(plan: RingPlan, width: int) -> Text:
    """Draw the tokens as a line of cells that show their ranks."""
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
        for line in computed(plan, axis, shift):
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
    """Return a table with a row per rank: positions, pairs in all steps and, if ``width`` allows, pairs in the first steps."""
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
