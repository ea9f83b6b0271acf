"""The programs in README and docs/, by name, and functions that start them like a user."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in (README, *sorted((ROOT / "docs").glob("**/*.md")))}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROGRAM = re.compile(r"# ((jax|torch)_\w+\.py)\n(.*)", re.DOTALL)
PROGRAMS = {name: body for page in PAGES.values() for block in BLOCK.findall(page) for name, _, body in PROGRAM.findall(block)}

RING_TRAINER = "5.20"
"""The oldest transformers that RingTrainer takes."""


def skip_without_its_packages(text: str) -> None:
    """Skip the test if an optional package that a program imports is not installed."""
    for package in ("trl", "datasets", "diffusers", "torchtitan"):
        if re.search(rf"^(from|import) {package}\b", text, re.M):
            pytest.importorskip(package)
    if "RingTrainer" in text:
        pytest.importorskip("transformers", minversion=RING_TRAINER, reason="RingTrainer needs it")


def run(
    program: str,
    framework: str,
    folder: Path = ROOT,
    processes: int = 4,
    arguments: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
) -> str:
    """Run a program in ``folder``, with torchrun and ``processes`` processes for PyTorch. Return its standard output."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if framework == "torch" else []
    return started([*launch, program, *arguments], folder, variables)


def started(arguments: list[str], folder: Path, variables: dict[str, str] | None = None) -> str:
    """Run this interpreter with ``arguments`` and return its standard output; fail with its standard error."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(variables), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def environment(variables: dict[str, str] | None = None) -> dict[str, str]:
    """Return a user's environment: this checkout on the path, one thread, and none of the tests' XLA flags."""
    return os.environ | {"PYTHONPATH": _with_root(), "OMP_NUM_THREADS": "1", "XLA_FLAGS": ""} | (variables or {})


def _with_root() -> str:
    """Return the search path with this checkout in front."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
