"""Does every way to spread a training over ranks take the steps of one process, in both frameworks?

    python -m benchmarks.steps [--dtype float64 float32] [--steps 200]

A small model with every feature of the layers trains on packed, padded documents, with dropout and clipping, from the same
initial weights: in PyTorch by one process and by four with a plain ring, FSDP2, DDP and tensor parallelism, in JAX on four
devices. The loss of each step and its gradient norm before clipping are compared with those of one process. SGD's model has a
tied head, AdamW's does not. Entries of results/steps.json for other dtypes are kept. Takes about 15 minutes on 2 idle cores.

Legend:
  losses, norms: the largest relative difference from one process over all steps;
  bars: 1e-9 in float64, 1e-5 for SGD in float32. For AdamW in float32 twice the difference that one process makes if each initial
  weight is moved one unit in the last place up or down, the largest of four draws;
  moved: weights that PyTorch has trained, loaded into JAX and back into PyTorch
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from ..support import harness, report
from . import jax_side, torch_side
from .cell import ONE, moved, steps
from .recipe import CLIP, Recipe, apart

BARS = {("float64", "sgd"): 1e-9, ("float64", "adamw"): 1e-9, ("float32", "sgd"): 1e-5}
KINDS = "losses", "norms"
ULP = "PyTorch, one process, first weights one ulp off: most of 4 draws"


def compared(recipe: Recipe) -> dict[str, Any]:
    """Compare all ways of training with one process and with the bars."""
    truth = steps(ONE, recipe)
    against = lambda found: {kind: float(f"{apart(found[kind], truth[kind]):.3g}") for kind in KINDS}
    ways, bar = {}, BARS.get((recipe.dtype, recipe.optimizer))
    if bar is None:
        draws = [against(steps(ONE, replace(recipe, moved=draw))) for draw in range(1, 5)]
        ways[ULP] = {kind: max(found[kind] for found in draws) for kind in KINDS}
    bars = {kind: bar or 2 * ways[ULP][kind] for kind in KINDS}
    ways |= {way: against(steps(way, recipe)) for way in (*torch_side.WAYS, *jax_side.WAYS)}
    within = all(found[kind] <= bars[kind] for found in ways.values() for kind in KINDS)
    loss, clipped = [round(truth["losses"][i], 3) for i in (0, -1)], sum(norm > CLIP for norm in truth["norms"])
    facts = {"steps": recipe.steps, "first_and_last_loss": loss, "clipped_steps": clipped}
    return facts | {"bars": bars, "within": within, "ways": ways}


def show(name: str, found: dict[str, Any]) -> Table:
    table = Table("", *KINDS, title=f"{name}, {found['steps']} steps: {'within' if found['within'] else 'BEYOND'} the bars")
    for way, row in {"bars": found["bars"], **found["ways"]}.items():
        table.add_row(way, *(f"{row[kind]:.2g}" for kind in KINDS))
    return table


if __name__ == "__main__":
    options = harness.options(__doc__, dtype=["float64", "float32"], optimizer=["sgd", "adamw"], steps=200)
    result = (report.load("steps") or {}) | harness.result_of(__doc__, legend=report.section(__doc__, "Legend"))
    for dtype in options.dtype:
        for optimizer in options.optimizer:
            found = result[f"{dtype} {optimizer}"] = compared(Recipe(dtype=dtype, optimizer=optimizer, steps=options.steps))
            Console().print(show(f"{dtype}, {optimizer}", found))
            report.save("steps", result)
        result[f"{dtype} moved"] = moved(Recipe(dtype=dtype, optimizer="adamw", steps=min(options.steps, 20)))
        print(f"{dtype}, weights to JAX and back: {result[f'{dtype} moved']}; written: {report.save('steps', result)}")
