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
from .cells import STEPS, Axis, colour, computed, self_attention
from .words import holds, short, title, travel_in_words

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def draw(plan: RingPlan, width: int = 80) -> RenderableType:
    """Return a rich renderable that draws ``plan`` in ``width`` columns. The fewer columns, the more tokens a cell holds."""
    balance = f"balance {plan.balance:.3f} (most work of a rank over the mean; 1 is perfect)"
    lines = [Text(title(plan), style="bold"), Text(travel_in_words(plan)), Text(balance), Text(), *_strips(plan, width), Text()]
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


def _strips(plan: RingPlan, width: int) -> list[Text]:
    """Draw the tokens as a line of cells that show their ranks. For cross-attention draw a line of queries and a line of keys."""
    lines = []
    for name, keys in (("tokens ", False),) if self_attention(plan) else (("queries ", False), ("keys    ", True)):
        axis = Axis.of(plan, max(width - 24, width // 2), keys=keys)  # 24 columns for the name and the cell size
        line = Text(name)
        for cell in range(len(axis.cells)):
            line.append(*(rank_cell(axis.ranks(cell)[0]) if axis.cells[cell] else ("/", "dim")))
        line.append(f"  {axis.block:,} a cell" if axis.block > 1 else "", style="dim")
        lines.append(line)
    return lines


def _matrices(plan: RingPlan, width: int) -> list[Table | Text]:
    """Draw a matrix of queries (down) by keys (across) for each of the first ``STEPS`` ring steps, and a legend.
    A row has four matrices: fewer if one would have less than 10 columns, more if each keeps at least 32."""
    chunks = plan.ranks * layouts.slots(plan.layout)
    across = max(min(4, (width + 2) // 12), (width + 2) // 34, 1)
    side = (width + 2) // across - 2
    most = side // chunks * chunks or side  # whole cells per slot if possible
    queries, keys = Axis.of(plan, most, keys=False), Axis.of(plan, most, keys=True)
    grid = Table.grid(padding=(0, 2, 0, 0))
    drawn = []
    for step, shift in enumerate(plan.shifts[:STEPS]):
        name = f"step {step}, shift {shift}"
        text = Text((name if len(name) <= side else name.replace(", ", "\n")) + "\n", no_wrap=True)
        for line in computed(plan, queries, keys, shift):
            for rank in line:
                text.append(*((".", "dim") if rank is None else rank_cell(rank)))
            text.append("\n")
        drawn.append(text)
    for first in range(0, len(drawn), across):
        grid.add_row(*drawn[first : first + across])
    legend = "queries down, keys across; a cell shows the rank that computes it"
    if queries.block > 1 or keys.block > 1:
        block = f"{queries.block:,} x {keys.block:,} tokens"
        legend = f"queries down, keys across; a cell is {block} and shows a rank that computes some of it"
    more = f"... {len(plan.shifts) - STEPS} more steps\n" if len(plan.shifts) > STEPS else ""
    return [grid, Text(more + legend, style="dim")]


def _table(plan: RingPlan, width: int) -> Table:
    """Return a table with a row per rank: positions, pairs in all steps and, if ``width`` allows, pairs in the first steps."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("rank", no_wrap=True)
    sides = [plan.q_runs] if self_attention(plan) else [plan.q_runs, plan.k_runs]
    for name, runs in zip(["holds"] if len(sides) == 1 else ["queries", "keys"], sides, strict=True):
        longest = max(len(word) for rank in runs for word in holds(rank).split())
        table.add_column(name, min_width=min(longest, max(width - 24, 0) // len(sides)), overflow="fold")
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
        table.add_row(
            Text(f" {rank} ", rank_cell(rank)[1]), *(holds(runs[rank]) for runs in sides), *steps[rank], short(work[rank]), share
        )
    return table


def compare_layouts(plans: list[RingPlan]) -> Table:
    table = Table(title=title(plans[0]).partition(", ")[2], title_justify="left", title_style="bold")
    table.add_column("layout")
    for name in ("steps", "hops", "way home", "balance", "pairs", "most of a rank"):
        table.add_column(name, justify="right")
    for each in plans:
        work = [each.work(rank) for rank in range(each.ranks)]
        travel = (f"{len(each.shifts)}", f"{len(each.hops)}", f"{each.home}")
        table.add_row(str(each.layout), *travel, f"{each.balance:.3f}", short(sum(work)), short(max(work)))
    table.caption = "hops: transfers of k/v; way home: by how many ranks the gradients travel last; balance: most work over mean"
    table.caption_justify = "left"
    return table
