"""The table of ``ring-attn plan --all-layouts``: all layouts of one length."""

from __future__ import annotations

from rich.table import Table

from ring_attn_core.plan.ring import RingPlan

from . import words


def comparison(plans: list[RingPlan]) -> Table:
    """Return a table with a row for each plan."""
    table = Table(title=words.title(plans[0]).partition(", ")[2], title_justify="left", title_style="bold")
    table.add_column("layout")
    for name in ("steps", "hops", "way home", "balance", "pairs", "most of a rank"):
        table.add_column(name, justify="right")
    for each in plans:
        work = [each.work(rank) for rank in range(each.ranks)]
        travel = (f"{len(each.shifts)}", f"{len(each.hops)}", f"{each.home}")
        table.add_row(str(each.layout), *travel, f"{each.balance:.3f}", words.short(sum(work)), words.short(max(work)))
    table.caption = (
        "hops: transfers of k/v; way home: by how many ranks the gradients travel last; balance: most work of a rank over mean"
    )
    table.caption_justify = "left"
    return table
