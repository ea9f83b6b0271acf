"""Fresh processes, their memory, and the CPU time of other processes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
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


class Others:
    """The CPU time of other processes on this machine since construction.

    This process and its children that have ended do not count as others.
    """

    def __init__(self) -> None:
        self._begin = time.monotonic(), _busy(), _own()

    def share(self) -> float:
        """Return the share of the CPU time that others took, from 0 to 1."""
        begin, busy, own = self._begin
        spent = (_busy() - busy) - (_own() - own)
        return max(spent, 0.0) / ((time.monotonic() - begin) * len(os.sched_getaffinity(0)))


def _busy() -> float:
    """Return the busy seconds of all processors since boot."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


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
