"""The answers about packed documents, a prefix tree and microbatches: the ranks that hold them, their work and traffic."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ring_attn_core import layouts
from ring_attn_core.data.balanced_trees import balanced_tree_layout, tree_work
from ring_attn_core.data.trees import Tree, trees_of
from ring_attn_core.plan.balanced import RankWork, balanced_layout, work_of
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.plan.batches import plan_batches
from ring_attn_core.plan.documents import PackedDocuments
from ring_attn_core.plan.needed import NeededPlan
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.problem.auto import HALF
from ring_attn_core.runs import Band, Run

from .options import check_drawn, read_words
from .terminal import Axis, count_in_words, mask_in_words, rank_cell, short

BALANCED = "balanced"
MAX_DOCUMENTS = 100_000
"""The largest number of documents that ``--batches`` accepts; their layouts take minutes."""
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class PackedPlan(NamedTuple):
    """Packed documents or tree segments (``parts``, by length) in one layout. ``work``: by rank (pairs, keys of other ranks)."""

    layout: str
    parts: tuple[int, ...]
    seq_local: int
    runs: list[tuple[Run, ...]]
    work: list[RankWork]

    @property
    def balance(self) -> float:
        """Return the load imbalance: the largest cost of visible pairs of a rank, divided by the mean cost; 1.0 without pairs."""
        pairs = [each.pairs for each in self.work]
        return max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else 1.0

    @property
    def held(self) -> list[set[int]]:
        starts = list(accumulate(self.parts, initial=0))
        at = lambda position: bisect_right(starts, position) - 1
        dense = lambda run: range(at(run.start), at(run.start + run.length - 1) + 1)
        parts = lambda run: dense(run) if run.stride == 1 else map(at, run.positions())
        return [{part for run in runs for part in parts(run)} for runs in self.runs]

    @property
    def whole(self) -> list[int]:
        held = self.held
        ranks_of = Counter(part for parts in held for part in parts)
        return [sum(ranks_of[part] == 1 for part in parts) for parts in held]


def plan_documents(layout: str, documents: tuple[int, ...], mask: Band, ranks: int) -> PackedPlan:
    local, runs = _deal(balanced_layout(documents, ranks, mask=mask) if layout == BALANCED else layout, sum(documents), ranks)
    packed = PackedDocuments.of(documents, mask)
    return PackedPlan(layout, documents, local, runs, [work_of(packed, each) for each in runs])


def plan_tree(layout: str, tree: Tree, ranks: int) -> PackedPlan:
    """Return the plan of a prefix tree; the work of a segment includes the keys of its ancestors."""
    local, runs = _deal(balanced_tree_layout(*tree, ranks) if layout == BALANCED else layout, tree.tokens, ranks)
    return PackedPlan(layout, tree.lengths, local, runs, [tree_work(tree, each) for each in runs])


def _deal(layout: str | BalancedLayout, length: int, ranks: int) -> tuple[int, list[tuple[Run, ...]]]:
    """Return the tokens of a shard, padding included, and each rank's runs of ``length`` positions, without padding."""
    if isinstance(layout, BalancedLayout):
        return layout.seq_local, [layout.held(rank) for rank in range(ranks)]
    local = layouts.padded_local(layout, ranks, length)
    held = ([run.before(length) for run in layouts.find_layout(layout)(rank, ranks, local)] for rank in range(ranks))
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


def read_batches(text: str) -> list[int]:
    """Parse ``--batches``: a JSON list of lengths, or lengths with commas or spaces between them, or a file of either."""
    words = [word for word in (word.strip("[]") for word in read_words(text, "--batches")) if word]
    try:
        lengths = list(map(int, words))
    except ValueError as error:
        raise ValueError(f"--batches takes lengths in tokens such as [4096, 512], or a file of them, got {text!r}") from error
    if len(lengths) > MAX_DOCUMENTS:
        raise ValueError(f"--batches lays out at most {MAX_DOCUMENTS:,} documents, got {len(lengths):,}: pass fewer")
    return lengths


def read_tree(text: str) -> Tree:
    """Parse ``--tree``, the segments of a prefix tree in depth-first order or a file of them: ``length`` or ``parent:length``
    (-1: a root), ``x16`` to repeat. Without parents, the first segment is the prompt and the later ones are its completions."""
    words = read_words(text, "--tree")
    found = [re.fullmatch(r"(?:(-?\d+):)?(\d+)(?:x([1-9]\d*))?", word, re.ASCII) for word in words]
    if not all(found) or not words:
        raise ValueError(
            "--tree takes the tokens of a prompt and of its completions such as 4096,512x8, segments as parent:length such as "
            f"-1:4096 0:512 0:64 2:300, or a file of them, got {text!r}"
        )
    parts = [(parent, int(length), int(times or 1)) for parent, length, times in (x.groups() for x in found if x)]
    check_drawn("--tree", sum(length * times for _, length, times in parts), sum(times for *_, times in parts))
    segments = [(parent, length) for parent, length, times in parts for _ in range(times)]
    parents = [int(parent) if parent else min(i, 1) - 1 for i, (parent, _) in enumerate(segments)]
    return trees_of(parents, [length for _, length in segments])[0]


def answer_documents(layout: str, documents: tuple[int, ...], mask: Band, ranks: int, width: int) -> RenderableType:
    """Return a rich renderable for ``width`` columns: a drawing of ``layout``, and tables of its ranks and of all layouts."""
    drawn = plan_documents(layout, documents, mask, ranks)
    sizes = f"{min(documents):,} to {max(documents):,}" if len(set(documents)) > 1 else f"{documents[0]:,}"
    whole = sum(drawn.whole)
    sent, direct = _under_direct(documents, mask, ranks) if layout == BALANCED else (None, [])
    lines = [
        f"{layout} layout, {mask_in_words(mask)}, {count_in_words(ranks, 'rank')}",
        f"{count_in_words(len(documents), 'document')} of {sizes} tokens, {sum(documents):,} in all",
        f"balance {drawn.balance:.3f} (most pairs of a rank over the mean; 1 is perfect)",
        f"{whole} of {len(documents)} documents on one rank: their keys do not travel",
        *direct,
    ]
    note = Text('only the balanced layout, with the strategy "direct", sends these keys alone', style="dim")
    make = lambda name: plan_documents(name, documents, mask, ranks)
    return Group(*_draw(drawn, lines, width, "documents", make, sent), note)


def answer_tree(layout: str, tree: Tree, ranks: int, width: int) -> RenderableType:
    drawn = plan_tree(layout, tree, ranks)
    inner = {parent for parent in tree.parents if parent >= 0}
    paths = zip(tree.depths(), tree.lengths, strict=True)
    rollouts = [depth + length for segment, (depth, length) in enumerate(paths) if segment not in inner]
    tokens, pairs = sum(rollouts), sum(path * (path + 1) // 2 for path in rollouts)
    own = int(sum(each.pairs for each in drawn.work))
    lines = [
        f"{layout} layout, prefix tree, {count_in_words(ranks, 'rank')}",
        f"{len(tree.lengths)} segments, {len(rollouts)} rollouts of up to {max(rollouts):,} tokens",
        f"{tree.tokens:,} tokens, {tokens:,} in rollouts alone: {tokens / tree.tokens:.1f} times fewer",
        f"{short(own)} pairs, {short(pairs)} in rollouts alone: {pairs / own:.1f} times fewer",
        f"balance {drawn.balance:.3f} (most pairs of a rank over the mean; 1 is perfect)",
    ]
    return Group(*_draw(drawn, lines, width, "segments", lambda name: plan_tree(name, tree, ranks)))


def answer_batches(lengths: list[int], ranks: int, tokens: int) -> RenderableType:
    plan = plan_batches(lengths, ranks, tokens)
    table = _number_table("microbatch", ("documents", "tokens", "longest", "pairs", "max/mean"), padding=(0, 1))
    for number, batch in enumerate(plan):
        counts = f"{len(batch.documents):,}", f"{sum(batch.lengths):,}", f"{max(batch.lengths):,}"
        table.add_row(str(number), *counts, short(int(batch.pairs)), f"{batch.balance:.3f}")
    table.caption, table.caption_justify = "max/mean: most pairs of a rank over the mean of the ranks", "left"
    return Group(Text(str(plan)), table)


def _under_direct(documents: tuple[int, ...], mask: Band, ranks: int) -> tuple[list[int], list[str]]:
    """Return how many keys each rank of the balanced layout sends by the strategy "direct", and text lines about this traffic."""
    layout = balanced_layout(documents, ranks, mask=mask)
    plan = NeededPlan(layout, mask, ranks, layout.seq_local, by_documents=True)
    sent = [sum(plan.tokens(owner, reader) for reader in range(ranks)) for owner in range(ranks)]
    if not plan.exchanges:
        return sent, []
    share = plan.busiest() / (len(RingPlan(layout, mask, ranks, layout.seq_local).hops) * layout.seq_local)
    busiest = f"the busiest rank receives or sends {share:.0%} of the keys that a ring brings it"
    return sent, [f'strategy "direct": {busiest}; "auto" takes it up to {HALF:.0%}']


def _draw(
    drawn: PackedPlan, lines: list[str], width: int, what: str, make: Callable[[str], PackedPlan], sent: list[int] | None = None
) -> list[RenderableType]:
    """Return ``lines`` (the first in bold), a drawing of the tokens, and the tables of the ranks and of all layouts.
    ``what``: the parts, a plural. ``make``: plans another layout. ``sent``: keys that each rank sends under "direct"."""
    others = [make(name) for name in (BALANCED, *layouts.LAYOUTS) if name != drawn.layout]
    head = [Text(lines[0], style="bold"), *map(Text, lines[1:]), Text()]
    return [*head, *_strips(drawn, width, what), _rank_table(drawn, what, sent), _layout_table([drawn, *others])]


def _strips(plan: PackedPlan, width: int, what: str) -> list[Text]:
    """Draw the positions as text lines of equal cells: the parts, below them the ranks, and a legend.
    A cell shows the letter of the part that fills more than half of it, else ".", and the rank with most of its tokens; "/"
    marks padding."""
    axis = Axis.cut(plan.runs, plan.seq_local * len(plan.runs), max(width - 28, width // 2))
    block, starts = axis.block, list(accumulate(plan.parts, initial=0))
    letters, ranks = Text(f"{what:<10}"), Text("ranks     ")
    for cell, held in enumerate(axis.cells):
        counts = {rank: sum(run.length for run in runs) for rank, runs in held.items()}
        first, end = cell * block, min((cell + 1) * block, starts[-1])
        at = bisect_right(starts, (first + end) // 2) - 1
        covers = at < len(plan.parts) and min(starts[at + 1], end) - max(starts[at], first) > block // 2
        letters.append(_LETTERS[at % 26] if covers else "." if counts else "/", style="" if covers else "dim")
        ranks.append(*(rank_cell(max(counts, key=lambda rank: counts[rank])) if counts else ("/", "dim")))
    ranks.append(f"  {block:,} tokens a cell" if block > 1 else "", style="dim")
    marks = {".": f"no {what[:-1]} has most of the cell", "/": "padding"}
    used = "; ".join(f"{mark} {words}" for mark, words in marks.items() if mark in letters.plain)
    return [letters, ranks, *([Text(f"{'':<10}{used}", style="dim")] if used else [])]


def _rank_table(plan: PackedPlan, what: str, sent: Sequence[int] | None) -> Table:
    """Return a table with a row for each rank: its runs, parts, pairs, share of the mean work, and keys of other ranks."""
    names = "runs", f"{what} whole", "in part", "pairs", "share", "keys of other ranks", *(["keys sent"] if sent else [])
    table, mean = _number_table("rank", names), sum(each.pairs for each in plan.work) / len(plan.work)
    for rank, (work, whole, held) in enumerate(zip(plan.work, plan.whole, plan.held, strict=True)):
        counts = len(plan.runs[rank]), whole, len(held) - whole
        share = f"{work.pairs / mean:.3f}" if mean else "-"
        keys = [f"{work.remote:,}", *([f"{sent[rank]:,}"] if sent else [])]
        table.add_row(Text(f" {rank} ", rank_cell(rank)[1]), *map(str, counts), short(int(work.pairs)), share, *keys)
    return table


def _layout_table(plans: list[PackedPlan]) -> Table:
    table = _number_table("layout", ("balance", "most pairs", "keys of other ranks", "of a ring"))
    for plan in plans:
        remote, ranks = sum(each.remote for each in plan.work), len(plan.runs)
        share = remote / max(ranks * (ranks - 1) * plan.seq_local, 1)
        pairs = short(int(max(each.pairs for each in plan.work)))
        table.add_row(plan.layout, f"{plan.balance:.3f}", pairs, f"{remote:,}", f"{100 * share:.1f} %")
    table.caption = "of a ring: keys of other ranks that are seen, as a share of those that a ring sends"
    table.caption_justify = "left"
    return table


def _number_table(label: str, names: Sequence[str], padding: tuple[int, int] = (0, 0)) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=padding)
    table.add_column(label, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    return table
