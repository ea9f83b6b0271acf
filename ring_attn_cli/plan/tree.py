"""The drawing of a prefix tree over a ring: the ranks that hold its segments, and the work and traffic of each layout."""

from __future__ import annotations

import re

from rich.console import Group, RenderableType
from rich.text import Text

from ring_attn_core import layouts
from ring_attn_core.data.balanced_trees import balanced_tree_layout, tree_work
from ring_attn_core.data.trees import Tree, trees_of

from .options import check_drawn, read_words
from .packed import BALANCED, PackedPlan, layout_table, rank_table, runs_of, strips
from .words import short


def read_tree(text: str) -> Tree:
    """Parse ``--tree``: the segments of a prefix tree in depth-first order, or the path of a file that holds them.
    A segment is ``length`` or ``parent:length``, -1 for a root; ``x16`` repeats it. Without parents, the first segment is the
    prompt and the later ones are its completions."""
    words, parents, lengths = read_words(text, "--tree"), [], []
    found = [re.fullmatch(r"(?:(-?\d+):)?(\d+)(?:x([1-9]\d*))?", word, re.ASCII) for word in words]
    if not all(found) or not words:
        raise ValueError(
            "--tree takes the tokens of a prompt and of its completions such as 4096,512x8, segments as parent:length such as "
            f"-1:4096 0:512 0:64 2:300, or a file of them, got {text!r}"
        )
    parts = [(parent, int(length), int(times or 1)) for parent, length, times in (x.groups() for x in found if x)]
    check_drawn("--tree", sum(length * times for _, length, times in parts), sum(times for *_, times in parts))
    for parent, length, times in parts:
        for _ in range(times):
            parents.append(int(parent) if parent else 0 if parents else -1)
            lengths.append(length)
    return trees_of(parents, lengths)[0]


def plan_of(layout: str, tree: Tree, ranks: int) -> PackedPlan:
    """Return the plan of a prefix tree; its ``documents`` are the segments, whose work includes the keys of ancestors."""
    local, runs = runs_of(balanced_tree_layout(*tree, ranks) if layout == BALANCED else layout, tree.tokens, ranks)
    return PackedPlan(layout, tree.lengths, local, runs, [tree_work(tree, each) for each in runs])


def answer(layout: str, tree: Tree, ranks: int, width: int) -> RenderableType:
    """Return a rich renderable for ``width`` columns: a drawing of ``layout``, and tables of its ranks and of all layouts."""

    drawn = plan_of(layout, tree, ranks)
    others = [plan_of(name, tree, ranks) for name in (BALANCED, *layouts.LAYOUTS) if name != layout]
    inner = {parent for parent in tree.parents if parent >= 0}
    paths = zip(tree.depths(), tree.lengths, strict=True)
    rollouts = [depth + length for segment, (depth, length) in enumerate(paths) if segment not in inner]
    tokens, pairs = sum(rollouts), sum(path * (path + 1) // 2 for path in rollouts)
    own = int(sum(each.pairs for each in drawn.work))
    lines = [
        Text(f"{layout} layout, prefix tree, {ranks} rank{'s' if ranks > 1 else ''}", style="bold"),
        Text(f"{len(tree.lengths)} segments, {len(rollouts)} rollouts of up to {max(rollouts):,} tokens"),
        Text(f"{tree.tokens:,} tokens, {tokens:,} in rollouts alone: {tokens / tree.tokens:.1f} times fewer"),
        Text(f"{short(own)} pairs, {short(pairs)} in rollouts alone: {pairs / own:.1f} times fewer"),
        Text(f"balance {drawn.balance:.3f} (most pairs of a rank over the mean; 1 is perfect)"),
        Text(),
        *strips(drawn, width, "segments"),
    ]
    held = [drawn.documents_of(rank) for rank in range(ranks)]
    rank_counts = [sum(segment in each for each in held) for segment in range(len(tree.lengths))]
    counts = [(sum(rank_counts[segment] == 1 for segment in each), len(each)) for each in held]
    return Group(*lines, rank_table(drawn, counts, "segments"), layout_table([drawn, *others]))
