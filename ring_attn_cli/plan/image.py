"""The picture of a RingPlan as PNG or SVG, drawn with matplotlib without pyplot's global state.

In the code, places in the picture are in inches from its left and its top; positions in a sequence are in tokens. The picture
has the same width for every plan.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.runs import Run

from ..output_files import check_writable
from .cells import STEPS, Axis, channels, colour, computed, mix, self_attention
from .words import short, title, travel_in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _QUIET, _LATER, _PADDING, _HATCH = "#24292F", "#6E7781", "#E6E9ED", "#FAFAFA", "#C4CAD1"
_WIDTH, _LEFT, _RIGHT, _STRIP, _GAP = 12.0, 0.78, 0.3, 0.36, 0.26
_INSET = 0.07
"""Width of a matrix's margin, as a fraction of the matrix's side. A strip in it shows the ranks that hold the tokens."""

_CELLS = 64
"""Most cells along one side of a matrix."""

_ACROSS = 4
"""Most matrices in a row."""

Tints = list[list[str | None]]
"""The colours of a matrix of cells, ``#rrggbb``; None: no colour."""


def check(path: Path) -> None:
    """Raise ValueError if the suffix of ``path`` is not .png or .svg, or if the file cannot be written."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"a plan is drawn as .png or .svg, got {path.name!r}: end the file name in one of these two")
    check_writable(path)


def save(plan: RingPlan, path: str | Path) -> None:
    """Write the picture of ``plan`` to ``path``, as PNG or SVG by its suffix."""
    path = Path(path)
    check(path)
    import matplotlib

    form = path.suffix.lower()[1:]
    with matplotlib.rc_context({"svg.hashsalt": "ring-attn", "font.family": "DejaVu Sans", "hatch.linewidth": 0.7}):
        metadata: dict[str, Any] = {"Date": None} if form == "svg" else {"Software": None}
        draw(plan).savefig(path, format=form, dpi=160, facecolor="white", metadata=metadata)


def draw(plan: RingPlan) -> Figure:
    """Return a figure of the tokens in ranks' colours, a matrix for each of the first ``STEPS`` steps, and each rank's work."""
    from matplotlib.figure import Figure

    shown = plan.shifts[:STEPS]
    across, down = min(len(shown), _ACROSS), -(-len(shown) // _ACROSS)
    names = ["tokens"] if self_attention(plan) else ["queries", "keys"]
    side = min((_WIDTH - _LEFT - _RIGHT - 2.7) / across - _GAP, 3.2)
    top, row = 1.35 + 0.95 * len(names) + 0.4, side + 0.66
    height = top + down * row + 0.34
    figure = Figure(figsize=(_WIDTH, height))

    def panel(x: float, y: float, wide: float, high: float) -> Axes:
        axes = figure.add_axes((x / _WIDTH, 1 - (y + high) / height, wide / _WIDTH, high / height))
        axes.tick_params(length=0, labelsize=10, labelcolor=_QUIET, pad=3)
        axes.spines[:].set_visible(False)
        return axes

    def words(x: float, y: float, text: str, **style: str | float) -> None:
        figure.text(x / _WIDTH, 1 - y / height, text, **{"color": _INK, "size": 12, **style})

    def quiet(x: float, y: float, text: str, size: float = 10.5) -> None:
        words(x, y, text, color=_QUIET, size=size)

    words(_LEFT, 0.5, title(plan), size=17, weight="bold")
    quiet(_LEFT, 0.78, travel_in_words(plan), 12)
    for i, name in enumerate(names):
        y = 1.35 + 0.95 * i
        words(_LEFT, y - 0.1, f"which rank holds which {name}", weight="bold")
        _strip(panel(_LEFT, y, _WIDTH - _LEFT - _RIGHT, _STRIP), Axis.of(plan, 256, keys=name == "keys"))

    queries, keys = Axis.of(plan, _CELLS, keys=False), Axis.of(plan, _CELLS, keys=True)
    tints = [[_LATER if seen else None for seen in line] for line in _visible(plan, queries, keys)]
    for step, shift in enumerate(shown):
        x, y = _LEFT + step % _ACROSS * (side + _GAP), top + step // _ACROSS * row
        words(x + side * _INSET, y - 0.27, f"step {step}", weight="bold")
        quiet(x + side * _INSET, y - 0.08, "each rank's own keys" if shift == 0 else f"keys from rank \N{MINUS SIGN} {shift}")
        axes = panel(x, y, side, side)
        ranks = computed(plan, queries, keys, shift)
        _matrix(axes, queries, keys, _choose(ranks, colour, tints))
        tints = _choose(ranks, lambda rank: mix(colour(rank), 3), tints)
        if step % _ACROSS == 0:
            axes.set_ylabel("query position", color=_QUIET, size=10.5)
        else:
            axes.set_yticklabels([])
        if step + _ACROSS >= len(shown):
            axes.set_xlabel("key position", color=_QUIET, size=10.5)
        else:
            axes.set_xticklabels([])

    x = _LEFT + across * (side + _GAP) + 0.65
    words(x, top - 0.27, "work of each rank", weight="bold")
    quiet(x, top - 0.08, f"most / mean = {plan.balance:.3f}")
    _bars(panel(x, top + side * _INSET, min(_WIDTH - _RIGHT - x, 4), side * (1 - _INSET) + (down - 1) * row), plan)
    legend = [f"... and {len(plan.shifts) - STEPS} more steps"] if len(plan.shifts) > STEPS else []
    legend += ["strong: computed at this step", "pale: before", "grey: later"] if len(shown) > 1 else []
    legend += ["hatched: padding"] if queries.held > queries.length or keys.held > keys.length else []
    quiet(_LEFT + side * _INSET, height - 0.2, "    ".join(legend))
    return figure


def _strip(axes: Axes, axis: Axis) -> None:
    """Draw the tokens of one sequence from left to right in the colours of their ranks."""
    tints, edges = _holders(axis), _edges(axis)
    _cells(axes, edges, [0, 1], [tints])
    first = 0
    for tint, cells in groupby(tints):
        end = first + len(list(cells))
        x0, x1 = edges[first], min(edges[end], axis.length)
        room = (x1 - x0) / axis.held * (_WIDTH - _LEFT - _RIGHT)
        if tint and room > 0.14:
            rank = axis.ranks(first)[0]
            label = f"rank {rank}" if room > 0.6 else f"{rank}"
            axes.text((x0 + x1) / 2, 0.47, label, ha="center", va="center", color=_on(tint), size=11, weight="bold")
            axes.vlines([x0, x1], 0, 1, color="white", linewidth=1)
        first = end
    _pad(axes, axis.length, 0, axis.held - axis.length, 1)
    axes.set(xlim=(0, max(axis.held, 1)), ylim=(0, 1), yticks=[])
    axes.set_xticks(*_ticks(axis))


def _choose(ranks: list[list[int | None]], tint: Callable[[int], str], others: Tints) -> Tints:
    """Return ``tint(rank)`` for each cell with a rank, and the colour in ``others`` for each without."""
    lines = zip(ranks, others, strict=True)
    return [[old if rank is None else tint(rank) for rank, old in zip(*line, strict=True)] for line in lines]


def _matrix(axes: Axes, queries: Axis, keys: Axis, tints: Tints) -> None:
    """Draw the matrix of one step, and the ranks of the tokens on its edges."""
    x, y, wide, high = _edges(keys), _edges(queries), max(keys.held, 1) * _INSET, max(queries.held, 1) * _INSET
    _cells(axes, x, y, tints)
    if max(len(x), len(y)) < 40:
        axes.vlines(x, 0, queries.length, color="white", linewidth=0.4)
        axes.hlines(y, 0, keys.length, color="white", linewidth=0.4)
    _cells(axes, x, [-0.9 * high, -0.35 * high], [_holders(keys)])
    _cells(axes, [-0.9 * wide, -0.35 * wide], y, [[tint] for tint in _holders(queries)])
    _pad(axes, keys.length, 0, keys.held - keys.length, queries.held)
    _pad(axes, 0, queries.length, keys.length, queries.held - queries.length)
    axes.plot([0, keys.held, keys.held, 0, 0], [0, 0, queries.held, queries.held, 0], color=_HATCH, linewidth=0.8)
    axes.set(xlim=(-wide, keys.held * 1.006), ylim=(queries.held * 1.006, -high))
    axes.set_xticks(*_ticks(keys))
    axes.set_yticks(*_ticks(queries))


def _cells(axes: Axes, x: list[float], y: list[float], tints: Tints) -> None:
    """Draw the cells between edges ``x`` and ``y``, also in an SVG as pixels: paths would show seams and make a large file."""
    from matplotlib.colors import to_rgba

    if min(len(x), len(y)) > 1:
        axes.pcolormesh(x, y, [[to_rgba(tint or "none") for tint in line] for line in tints], rasterized=True)


def _bars(axes: Axes, plan: RingPlan) -> None:
    """Draw the work of each rank as a bar, and a dashed line at the mean. With up to 16 ranks, a bar has one segment per step."""
    work = [plan.work(rank) for rank in range(plan.ranks)]
    most, mean, few = max(max(work), 1), sum(work) / plan.ranks, plan.ranks <= 16
    for rank in range(plan.ranks):
        steps = [plan.area(rank, shift) for shift in plan.shifts] if few else [work[rank]]
        ends = list(accumulate(steps, initial=0))
        axes.barh(
            [rank] * len(steps), steps, left=ends[:-1], height=0.74, color=colour(rank), edgecolor="white", linewidth=0.8 * few
        )
        if few:
            axes.text(most * 1.03, rank, short(work[rank]), va="center", color=_INK, size=10)
    axes.plot([mean, mean], [-0.5, plan.ranks - 0.5], color=_INK, linewidth=1.1, linestyle=(0, (4, 3)))
    named = range(0, plan.ranks, -(-plan.ranks // 16))
    axes.set(xlim=(0, most * 1.3), ylim=(plan.ranks - 0.4, -0.6), xticks=[])
    axes.set_yticks(named, [f"rank {rank}" for rank in named])
    axes.set_xlabel(
        ("pairs, a segment a step" if few else "pairs of query and key") + "\ndashed: the mean", color=_QUIET, size=10.5
    )


def _visible(plan: RingPlan, queries: Axis, keys: Axis) -> list[list[bool]]:
    """Return for [query cell][key cell] whether the mask admits any pair of it."""
    q_runs, k_runs = ([Run(c * x.block, x.block).before(x.length) for c in range(len(x.cells))] for x in (queries, keys))
    return [[plan.mask.onto(q, k).area(q.length, k.length) > 0 for k in k_runs] for q in q_runs]


def _holders(axis: Axis) -> list[str | None]:
    """Return the colour of a rank that holds tokens of each cell, None for padding."""
    return [colour(axis.ranks(cell)[0]) if held else None for cell, held in enumerate(axis.cells)]


def _pad(axes: Axes, x: float, y: float, wide: float, high: float) -> None:
    if wide > 0 and high > 0:
        axes.broken_barh([(x, wide)], (y, high), facecolor=_PADDING, edgecolor=_HATCH, hatch="////", linewidth=0)


def _edges(axis: Axis) -> list[float]:
    return [min(cell * axis.block, axis.held) for cell in range(len(axis.cells) + 1)]


def _ticks(axis: Axis) -> tuple[list[int], list[str]]:
    """Return (tick positions, tick labels): quarters of the length if 4 divides it, else multiples of a round number."""
    steps = (digit * 10**power for power in range(18) for digit in (1, 2, 5))
    step = axis.length // 4 if axis.length % 4 == 0 else next(step for step in steps if axis.length <= 5 * step)
    ticks = list(range(0, axis.length + 1, max(step, 1)))
    return ticks, [short(tick) for tick in ticks]


def _on(tint: str) -> str:
    """Return the text colour on ``tint``: white, or dark if ``tint`` is light."""
    red, green, blue = channels(tint)
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 175 else _INK
