"""The table of ``ring-attn plan --batches``: the microbatches of a global batch of documents."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ring_attn_core.plan.batches import plan_batches

from .options import read_words
from .words import short

MOST_DOCUMENTS = 100_000
"""The largest number of documents that ``--batches`` accepts; their layouts take minutes."""


def read_batches(text: str) -> list[int]:
    """Parse ``--batches``: a JSON list of lengths, or lengths with commas or spaces between them, or a file of either."""
    words = [word for word in (word.strip("[]") for word in read_words(text, "--batches")) if word]
    try:
        lengths = list(map(int, words))
    except ValueError as error:
        raise ValueError(f"--batches takes lengths in tokens such as [4096, 512], or a file of them, got {text!r}") from error
    if len(lengths) > MOST_DOCUMENTS:
        raise ValueError(f"--batches lays out at most {MOST_DOCUMENTS:,} documents, got {len(lengths):,}: pass fewer")
    return lengths


def answer(lengths: list[int], ranks: int, tokens: int) -> RenderableType:
    """Return a rich renderable: what the plan says in words, and a row for each microbatch of ``ranks`` x ``tokens`` tokens."""
    plan, table = plan_batches(lengths, ranks, tokens), Table()
    for name in ("microbatch", "documents", "tokens", "longest", "pairs", "max/mean"):
        table.add_column(name, justify="right")
    for number, batch in enumerate(plan):
        counts = f"{len(batch.documents):,}", f"{sum(batch.lengths):,}", f"{max(batch.lengths):,}"
        table.add_row(str(number), *counts, short(int(batch.pairs)), f"{batch.balance:.3f}")
    table.caption, table.caption_justify = "max/mean: most pairs of a rank over the mean of the ranks", "left"
    return Group(Text(str(plan)), table)
