"""The run of the demo: choose the frameworks, compute, print, write the files, and return the exit status."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..output_files import check_writable
from ..processes import Failure
from . import report
from .gather import gather
from .judge import exit_status
from .settings import DemoSettings

NEEDS = {"PyTorch": ("torch",), "JAX": ("jax", "flax", "optax")}
FRAMEWORKS = {"both": ("PyTorch", "JAX"), "torch": ("PyTorch",), "jax": ("JAX",)}


def run(settings: DemoSettings, framework: str = "both", out: Path = Path("demo-output")) -> int:
    """Run the demo, print its report, and write losses.png, plan.png and demo.json into ``out``.
    Return the status: 1 if a bound is missed or a process fails, 130 on Ctrl-C, else 0. Only a complete run writes files."""
    frameworks, left_out = available(framework)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{out} cannot be made a folder ({error.strerror}): pass another --out FOLDER") from error
    for file in report.files(out):
        check_writable(file)
    console = Console(highlight=False)
    console.print(report.opening(settings, left_out))
    began = time.perf_counter()
    try:
        gathered = gather(settings, frameworks, console)
    except Failure as failure:
        console.print(Text.assemble(("The demo did not finish: ", "bold red"), str(failure)))
        return 1
    except KeyboardInterrupt:
        console.print("Stopped, and with it every process that the demo had started.")
        return 130
    seconds = time.perf_counter() - began
    console.print(report.losses(gathered.losses))
    files = report.write(out, settings, gathered, seconds)
    console.print(report.verdict(gathered.checks, files, seconds))
    return exit_status(gathered.checks)


def available(framework: str) -> tuple[list[str], list[str]]:
    """Return the frameworks that will run, and a message for each requested one that is not installed."""
    if framework not in FRAMEWORKS:
        raise ValueError(f"unknown framework {framework!r}: choose one of {', '.join(FRAMEWORKS)}")
    frameworks, left_out = [], []
    for name in FRAMEWORKS[framework]:
        missing = [package for package in NEEDS[name] if find_spec(package) is None]
        if missing:
            remedy = 'run pip install "ring-attn[demo]"'
            left_out.append(f"{name} is left out, for {' and '.join(missing)} is not installed: {remedy}")
        else:
            frameworks.append(name)
    if not frameworks:
        raise ValueError("; ".join(left_out))
    return frameworks, left_out
