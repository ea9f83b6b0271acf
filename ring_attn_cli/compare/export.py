"""Export of a comparison: JSON of a versioned schema (described in docs/compare.md), and a BibTeX entry."""

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


def document(comparison: Comparison) -> dict[str, Any]:
    """Return every number of a comparison as JSON-compatible data; infinities and NaN become the strings "inf" and "nan"."""
    return _carried(
        {
            "schema": SCHEMA,
            "passed": comparison.passed,
            "command": command(),
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "commit": commit(),
            "versions": versions(),
            "hardware": hardware(comparison),
            "variants": list(comparison.sweep.named),
            "swept": comparison.sweep.axis or None,
            "repeats": comparison.sweep.repeats,
            "results": [_result(result) for result in comparison.results],
            "left_out": [asdict(each) for each in comparison.left_out],
        }
    )


def _result(result: VariantResult) -> dict[str, Any]:
    return {
        "variant": result.variant,
        "framework": result.framework,
        "ranks": result.ranks,
        "case": result.case.as_dict(),
        "passed": result.passed,
        "truth_of": result.part or "all",
        "quantities": [asdict(quantity) | {"within": quantity.within} for quantity in result.quantities],
        "diagnosis": list(result.diagnosis),
        "seconds": list(result.seconds),
        "median_seconds": result.median_seconds,
        "peak_bytes": result.peak_bytes,
        "peak_of": result.peak_of,
    }


def _carried(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _carried(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_carried(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def command() -> str:
    """Return the command line of this process."""
    program = Path(sys.argv[0]).name
    return shlex.join(["ring-attn" if program in ("main.py", "ring-attn") else program, *sys.argv[1:]])


def commit() -> str | None:
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
    """Return the versions of this library, Python, and the installed packages of ``PACKAGES``."""
    found = {"ring-attn": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware(comparison: Comparison) -> dict[str, Any]:
    """Return the machine, its processor, and the devices of each framework."""
    return {"machine": platform.platform(), "cpu": _cpu(), "devices": comparison.kinds}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def bibtex(comparison: Comparison) -> str:
    """Return a BibTeX entry that cites this run: variants, command, versions, devices, date and, if known, commit."""
    now = datetime.now(UTC)
    with_versions = ", ".join(f"{name} {number}" for name, number in versions().items())
    device = " and ".join(dict.fromkeys([*comparison.kinds.values()])).replace("cpu", _cpu())
    at = commit()
    escaped = lambda text: text.replace("\\", "").replace("_", r"\_").replace("&", r"\&").replace("%", r"\%").replace("#", r"\#")
    note = f"{with_versions}; {device}" + (f"; commit {at}" if at else "")
    fields = {
        "author": "{ring-attn authors}",
        "title": f"ring-attn compare: {escaped(', '.join(comparison.sweep.named))}",
        "year": f"{now.year}",
        "howpublished": rf"\texttt{{{escaped(command())}}}",
        "note": escaped(note),
    }
    return f"@misc{{ring-attn-compare-{now:%Y%m%d}, " + ", ".join(f"{name} = {{{value}}}" for name, value in fields.items()) + "}"
