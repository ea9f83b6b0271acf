"""The run of the demo: compare, train in both frameworks at the same time, print, write the files, and return the exit status."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..compare.comparison import Comparison, compare
from ..compare.report import draw, width_of
from ..compare.sweep import make_sweep
from ..output_files import check_writable
from ..processes import Failure, WorkerGroups, preload
from . import report
from .settings import DemoSettings

NEEDS = {"PyTorch": ("torch",), "JAX": ("jax", "flax", "optax")}
FRAMEWORKS = {"both": ("PyTorch", "JAX"), "torch": ("PyTorch",), "jax": ("JAX",)}


def run(settings: DemoSettings, framework: str = "both", out: Path = Path("demo-output")) -> int:
    """Run the demo and write its files if complete. Return 1 if a bound is missed or a process fails, 130 on Ctrl-C, else 0."""
    frameworks, left_out = find_frameworks(framework)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{out} cannot be made a folder ({error.strerror}): pass another --out FOLDER") from error
    files = [out / name for name in report.FILES]
    for file in files:
        check_writable(file)
    console = Console(highlight=False)
    console.print(report.open_report(settings, left_out))
    began = time.perf_counter()
    try:
        compared, losses = compute(settings, frameworks, console)
    except Failure as failure:
        console.print(Text.assemble(("The demo did not finish: ", "bold red"), str(failure)))
        return 1
    except KeyboardInterrupt:
        console.print("Stopped, and with it every process that the demo had started.")
        return 130
    seconds = time.perf_counter() - began
    checks = report.check_losses(losses)
    report.write(out, settings, compared, losses, seconds)
    console.print(report.draw_losses(losses), report.conclude(checks, seconds), sep="")
    console.print(f"Written: {', '.join(map(str, files))}", markup=False)
    return 0 if report.is_passed(compared, checks) else 1


def find_frameworks(framework: str) -> tuple[list[str], list[str]]:
    """Return the frameworks that will run, and a message for each requested one that is not installed."""
    if framework not in FRAMEWORKS:
        raise ValueError(f"unknown framework {framework!r}: choose one of {', '.join(FRAMEWORKS)}")
    missing = {name: [package for package in NEEDS[name] if find_spec(package) is None] for name in FRAMEWORKS[framework]}
    remedy = 'run pip install "ring-attn[demo]"'
    left_out = [
        f"{name} is left out, for {' and '.join(gone)} is not installed: {remedy}" for name, gone in missing.items() if gone
    ]
    if len(left_out) == len(missing):
        raise ValueError("; ".join(left_out))
    return [name for name, names in missing.items() if not names], left_out


def compute(settings: DemoSettings, frameworks: list[str], console: Console) -> tuple[Comparison, dict[str, list[float]]]:
    """Compare attention and train; return the comparison and the losses. Print the comparison as soon as it is known."""
    names = ",".join({"PyTorch": "torch", "JAX": "jax"}[name] for name in frameworks)
    case = {"length": settings.tokens, "layout": settings.layout}
    sweep = make_sweep(["ring"], settings.ranks, names, 1, settings.patience, **case)
    losses: dict[str, list[float]] = {name: [] for name in frameworks}
    preload("ring_attn_cli.train.torch_worker")  # before the comparison starts the server of all ranks
    with console.status("") as status, WorkerGroups(settings.patience) as groups:
        start = lambda name, ranks: groups.start(
            name, "ring_attn_cli.demo.worker", [(name, rank, settings, groups.store) for rank in range(ranks)]
        )
        if "JAX" in frameworks:
            start("JAX", 1)  # it waits with all its imports until the comparison is done
        found = compare(sweep, lambda words: status.update(f"attention: {words}"))
        console.print(draw(found, width_of(console.width)))
        if "PyTorch" in frameworks:
            start("PyTorch", settings.ranks)
        for name in frameworks:
            groups.send(name, settings.ranks, "train")
        for message in groups.messages():
            losses[message.group].append(message.data)
            steps = ", ".join(f"{name} {len(each)} of {settings.steps}" for name, each in losses.items())
            status.update(f"training: step {steps}")
    return found, losses
