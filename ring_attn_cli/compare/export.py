"""Export of a comparison as JSON of a versioned schema, described in docs/compare.md."""

from __future__ import annotations

import math
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ring_attn_core import __version__

from .comparison import Comparison, VariantResult

SCHEMA = 1
PACKAGES = (
    "torch", "jax", "jaxlib", "flax", "triton", "numpy", "flash-attn-4", "ring-flash-attn",
    "ring-attention-pytorch", "ringattention",
)  # fmt: skip


def describe(comparison: Comparison) -> dict[str, Any]:
    """Return every number of a comparison as JSON-compatible data; infinities and NaN become the strings "inf" and "nan"."""
    program = Path(sys.argv[0]).name
    return _encode(
        {
            "schema": SCHEMA,
            "passed": comparison.passed,
            "command": shlex.join(["ring-attn" if program in ("main.py", "ring-attn") else program, *sys.argv[1:]]),
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "commit": _commit(),
            "versions": versions(),
            "hardware": {"machine": platform.platform(), "cpu": _cpu(), "devices": comparison.kinds},
            "variants": list(comparison.sweep.named),
            "swept": comparison.sweep.axis or None,
            "repeats": comparison.sweep.repeats,
            "results": [_result(result) for result in comparison.results],
            "left_out": [asdict(each) for each in comparison.left_out],
        }
    )


def _result(result: VariantResult) -> dict[str, Any]:
    names = "variant", "framework", "ranks", "passed", "diagnosis", "seconds", "median_seconds", "peak_bytes", "peak_of"
    quantities = [asdict(quantity) | {"within": quantity.within} for quantity in result.quantities]
    others = {"case": asdict(result.case), "truth_of": result.part or "all", "quantities": quantities}
    return {name: getattr(result, name) for name in names} | others


def _encode(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _encode(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_encode(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def _commit() -> str | None:
    """Return the git commit of this file's checkout, with "+" if tracked files changed; None if git or checkout is missing."""
    git = lambda *words: subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    try:
        if git("ls-files", "--error-unmatch", Path(__file__).name).returncode:
            return None  # an installed copy inside another repository
        found = git("rev-parse", "HEAD").stdout.strip()
        return found + "+" * bool(git("status", "--porcelain", "--untracked-files=no").stdout.strip())
    except OSError:
        return None


def versions() -> dict[str, str]:
    found = {"ring-attn": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
