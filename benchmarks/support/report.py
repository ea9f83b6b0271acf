"""The stored form of a result: the machine, versions, commit and command, and sections of the benchmark's docstring."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from .process import ROOT, total

RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = (
    "torch",
    "jax",
    "jaxlib",
    "triton",
    "numpy",
    "flash-attn-4",
    "flashinfer-python",
    "ring-attention-pytorch",
    "transformers",
)


def environment() -> dict[str, Any]:
    """Return the hardware, versions, date, commit, command and load of a measurement."""
    cpus = [
        line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    return {
        "hardware": {"cpu": cpus[0] if cpus else platform.machine(), "cores": cores(), "memory_gib": round(total() / 2**30, 1)},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES if _version(name)},
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "command": " ".join([program(), *sys.argv[1:]]),
        "load_before": round(os.getloadavg()[0], 2),
    }


def program() -> str:
    """Return the command of this process: ``python -m benchmarks.<folder>``."""
    started = sys.modules["__main__"].__spec__
    return "python " + (f"-m {started.name.removesuffix('.__main__')}" if started else os.path.relpath(sys.argv[0], ROOT))


def cores() -> int:
    return len(os.sched_getaffinity(0))


def commit() -> str:
    """Return the commit, with " with changes" if the packages differ from it; without a hash outside a git checkout."""
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "ring_attn_core", "ring_attn_jax", "ring_attn_torch")
    return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0]


def section(text: str | None, title: str) -> str:
    """Return the paragraphs of a docstring under the line ``title:``, up to the next line of one word and a colon."""
    kept: list[str] = []
    inside = False
    for line in (text or "").splitlines():
        if line.endswith(":") and line[:1].isupper() and " " not in line:
            inside = line == title + ":"
        elif inside:
            kept.append(line.strip())
    return " ".join(kept).strip()


def save(name: str, result: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def load(name: str) -> dict[str, Any] | None:
    """Return a saved result, or None."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
