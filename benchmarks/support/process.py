"""Fresh processes and their memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_fresh(
    module: str, argument: dict[str, Any], processes: int = 1, environment: Mapping[str, str] | None = None
) -> list[Any]:
    """Run ``python -m module JSON`` in ``processes`` new processes at once and return their answers by rank.

    Each process gets ``argument``, its ``rank`` and a ``store`` (an unused path for a rendezvous), and prints its answer by
    :func:`answer`. Raise RuntimeError with the end of its stderr if one fails.
    """
    with tempfile.TemporaryDirectory(prefix="ring-attn-") as folder:
        command = [sys.executable, "-m", module]
        shared = {**argument, "store": f"{folder}/store"}
        started = [
            subprocess.Popen(
                [*command, json.dumps({**shared, "rank": rank})],
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(processes)
        ]
        ended = [(process, *process.communicate()) for process in started]
    for process, _, errors in ended:
        if process.returncode:
            raise RuntimeError(f"{module} ended with {process.returncode} on {argument}:\n{errors[-3000:]}")
    return [json.loads(output.splitlines()[-1]) for _, output, _ in ended]


def argument() -> dict[str, Any]:
    """Return the argument of this fresh process."""
    return json.loads(sys.argv[1])


def answer(value: Any) -> None:
    """Print the answer of this fresh process for its parent."""
    print(json.dumps(value), flush=True)


class Memory:
    """The peak resident memory of this process above the resident memory at construction, in bytes (Linux)."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak: imports and inputs may have needed more
        self._baseline = _status("VmRSS")

    def peak(self) -> int:
        return _status("VmHWM") - self._baseline


def available() -> int:
    """Return the available memory in bytes."""
    return _kib(Path("/proc/meminfo"), "MemAvailable")


def total() -> int:
    return _kib(Path("/proc/meminfo"), "MemTotal")


def _status(field: str) -> int:
    return _kib(Path("/proc/self/status"), field)


def _kib(path: Path, field: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024
