"""The drawing of packed documents over a ring: the ranks that hold them, and the work and traffic of each layout."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ring_attn_core import layouts
from ring_attn_core.plan.balanced import RankWork, balanced_layout, work_of
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.plan.documents import PackedDocuments
from ring_attn_core.plan.needed import NeededPlan
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.problem.auto import HALF
from ring_attn_core.runs import Band, Run

from .options import check_drawn, read_words
from .terminal import rank_cell
from .words import mask_in_words, short

BALANCED = "balanced"
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class PackedPlan(NamedTuple):
    """Packed documents, by their lengths, in one layout of a ring.
    ``seq_local``: tokens per shard, padding included. ``runs``, without padding, and ``work`` (cost of visible pairs, keys of
    other ranks): by rank."""

    layout: str
    documents: tuple[int, ...]
    seq_local: int
    runs: list[tuple[Run, ...]]
    work: list[RankWork]

    @classmethod
    def of(cls, layout: str, documents: tuple[int, ...], mask: Band, ranks: int) -> PackedPlan:
        """Return the plan of ``documents``. Raise ValueError if the layout is unknown or an argument is invalid."""
        dealt = balanced_layout(documents, ranks, mask=mask) if layout == BALANCED else layout
        packed = PackedDocuments.of(documents, mask)
        local, runs = runs_of(dealt, sum(documents), ranks)
        return cls(layout, documents, local, runs, [work_of(packed, each) for each in runs])

    @property
    def balance(self) -> float:
        """Return the load imbalance: the largest cost of visible pairs of a rank, divided by the mean cost; 1.0 without pairs."""
        pairs = [each.pairs for each in self.work]
        return max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else 1.0

    @property
    def share(self) -> float:
        """Return the number of remote keys that ranks see, divided by the number that they get if each shard visits all ranks."""
        ranks = len(self.runs)
        return sum(each.remote for each in self.work) / max(ranks * (ranks - 1) * self.seq_local, 1)

    def documents_of(self, rank: int) -> set[int]:
        """Return the indices of the documents that have a token on this rank."""
        starts, found = list(accumulate(self.documents, initial=0)), set()
        for run in self.runs[rank]:
            if run.stride == 1:
                last = run.start + run.length - 1
                found.update(range(bisect_right(starts, run.start) - 1, bisect_right(starts, last)))
            else:
                found.update(bisect_right(starts, position) - 1 for position in run.positions())
        return found


def runs_of(layout: str | BalancedLayout, length: int, ranks: int) -> tuple[int, list[tuple[Run, ...]]]:
    """Return the tokens of a shard, padding included, and each rank's runs of ``length`` positions, without padding."""
    if isinstance(layout, BalancedLayout):
        return layout.seq_local, [layout.held(rank) for rank in range(ranks)]
    local = layouts.padded_local(layout, ranks, length)
    held = ([run.before(length) for run in layouts.named(layout)(rank, ranks, local)] for rank in range(ranks))
    return local, [tuple(run for run in each if run.length) for each in held]


def read_documents(text: str) -> tuple[int, ...]:
    """Parse ``--documents``: lengths with commas or spaces between them, or the path of a file that holds such lengths."""
    words = read_words(text, "--documents")
    try:
        documents = tuple(map(int, words))
    except ValueError as error:
        raise ValueError(f"--documents takes lengths in tokens such as 4096,512,1024, or a file of them, got {text!r}") from error
    if not documents or min(documents) < 1:
        raise ValueError(f"--documents takes lengths of at least 1 token such as 4096,512,1024, got {text!r}")
    check_drawn("--documents", sum(documents), len(documents))
    return documents


def answer(layout: str, documents: tuple[int, ...], mask: Band, ranks: int, width: int) -> RenderableType:
    """Return a rich renderable for ``width`` columns: a drawing of ``layout``, and tables of its ranks and of all layouts."""

    drawn = PackedPlan.of(layout, documents, mask, ranks)
    others = [PackedPlan.of(name, documents, mask, ranks) for name in (BALANCED, *layouts.LAYOUTS) if name != layout]
    sizes = f"{min(documents):,} to {max(documents):,}" if len(set(documents)) > 1 else f"{documents[0]:,}"
    count = f"{len(documents)} document{'s' if len(documents) > 1 else ''} of {sizes} tokens, {sum(documents):,} in all"
    title = f"{layout} layout, {mask_in_words(mask)}, {ranks} rank{'s' if ranks > 1 else ''}"
    held = [drawn.documents_of(rank) for rank in range(ranks)]
    rank_counts = [sum(document in each for each in held) for document in range(len(documents))]
    whole = rank_counts.count(1)
    sent, direct = _under_direct(documents, mask, ranks) if layout == BALANCED else (None, [])
    lines = [
        Text(title, style="bold"),
        Text(count),
        Text(f"balance {drawn.balance:.3f} (most pairs of a rank over the mean; 1 is perfect)"),
        Text(f"{whole} of {len(documents)} documents on one rank: their keys do not travel"),
        *map(Text, direct),
        Text(),
        *strips(drawn, width),
    ]
    return Group(
        *lines,
        rank_table(drawn, [(sum(rank_counts[d] == 1 for d in each), len(each)) for each in held], sent=sent),
        layout_table([drawn, *others]),
        Text('only the balanced layout, with the strategy "direct", sends these keys alone', style="dim"),
    )


def _under_direct(documents: tuple[int, ...], mask: Band, ranks: int) -> tuple[list[int], list[str]]:
    """Return how many keys each rank of the balanced layout sends by the strategy "direct", and text lines about this traffic."""
    layout = balanced_layout(documents, ranks, mask=mask)
    plan = NeededPlan(layout, mask, ranks, layout.seq_local, by_documents=True)
    sent = [sum(plan.tokens(owner, reader) for reader in range(ranks)) for owner in range(ranks)]
    hops = len(RingPlan(layout, mask, ranks, layout.seq_local).hops)
    if not plan.exchanges:
        return sent, []
    share = plan.busiest() / (hops * layout.seq_local)
    of_ring = f"the busiest rank receives or sends {share:.0%} of the keys that a ring brings it"
    return sent, [f'strategy "direct": {of_ring}; "auto" takes it up to {HALF:.0%}']


def strips(plan: PackedPlan, width: int, what: str = "documents") -> list[Text]:
    """Draw the positions as text lines of equal cells: the documents, below them the ranks, and a legend.
    A cell shows the letter of the document that fills more than half of it, else ".", and the rank with most of its tokens; "/"
    marks padding. ``what``: the heading, a plural."""

    held = plan.seq_local * len(plan.runs)
    block = max(-(-held // max(width - 28, width // 2)), 1)
    cells: list[dict[int, int]] = [{} for _ in range(0, held, block)]
    for rank, runs in enumerate(plan.runs):
        for run in runs:
            last = run.start + run.stride * (run.length - 1)
            for cell in range(run.start // block, last // block + 1):
                tokens = run.before((cell + 1) * block).length - run.before(cell * block).length
                cells[cell][rank] = cells[cell].get(rank, 0) + tokens
    starts = list(accumulate(plan.documents, initial=0))
    letters, ranks = Text(f"{what:<10}"), Text("ranks     ")
    for cell, counts in enumerate(cells):
        first, end = cell * block, min((cell + 1) * block, starts[-1])
        at = bisect_right(starts, (first + end) // 2) - 1
        covers = at < len(plan.documents) and min(starts[at + 1], end) - max(starts[at], first) > block // 2
        letters.append(_LETTERS[at % 26] if covers else "." if counts else "/", style="" if covers else "dim")
        ranks.append(*(rank_cell(max(counts, key=lambda rank: counts[rank])) if counts else ("/", "dim")))
    ranks.append(f"  {block:,} tokens a cell" if block > 1 else "", style="dim")
    marks = {".": f"no {what[:-1]} has most of the cell", "/": "padding"}
    used = "; ".join(f"{mark} {words}" for mark, words in marks.items() if mark in letters.plain)
    return [letters, ranks, *([Text(f"{'':<10}{used}", style="dim")] if used else [])]


def rank_table(
    plan: PackedPlan, documents: Sequence[tuple[int, int]], what: str = "documents", sent: Sequence[int] | None = None
) -> Table:
    """Return a table with a row for each rank: its runs, documents, pairs, share of the mean work, and keys of other ranks.
    ``documents``: for each rank, (wholly on it, with any token on it). ``sent``: keys that it sends under "direct", if shown."""

    names = "runs", f"{what} whole", "in part", "pairs", "share", "keys of other ranks", *(["keys sent"] if sent else [])
    table = _number_table("rank", names)
    mean = sum(each.pairs for each in plan.work) / len(plan.work)
    for rank, (work, (whole, some)) in enumerate(zip(plan.work, documents, strict=True)):
        share = f"{work.pairs / mean:.3f}" if mean else "-"
        counts = (len(plan.runs[rank]), whole, some - whole)
        keys = [f"{work.remote:,}", *([f"{sent[rank]:,}"] if sent else [])]
        table.add_row(Text(f" {rank} ", rank_cell(rank)[1]), *map(str, counts), short(int(work.pairs)), share, *keys)
    return table


def layout_table(plans: list[PackedPlan]) -> Table:
    """Return a table with a row per plan: balance, most pairs of any rank, remote keys of all ranks, and ``PackedPlan.share``."""

    table = _number_table("layout", ("balance", "most pairs", "keys of other ranks", "of a ring"))
    for plan in plans:
        remote = sum(each.remote for each in plan.work)
        pairs = short(int(max(each.pairs for each in plan.work)))
        table.add_row(plan.layout, f"{plan.balance:.3f}", pairs, f"{remote:,}", f"{100 * plan.share:.1f} %")
    table.caption = "of a ring: keys of other ranks that are seen, as a share of those that a ring sends"
    table.caption_justify = "left"
    return table


def _number_table(label: str, names: Sequence[str]) -> Table:
    """Return an empty table with a column of labels and right-aligned columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column(label, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    return table
