"""The processes of all cases: when each ended, and what it said last."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..support.process import ROOT

LAST_WORDS = re.compile(r"lost the ring|\w+Error: |aught collective operation timeout|went on")


class Case:
    """The ranks of a ring, started at once. ``given``: the argument of each. ``codes``, ``ended``: of each, when it has ended."""

    def __init__(self, given: dict[str, Any], store: str, ranks: int, environment: dict[str, str]) -> None:
        self.given, self.ranks = given, ranks
        self.codes: list[int | None] = [None] * ranks
        self.ended = [0.0] * ranks
        self._logs = [Path(f"{store}.{rank}") for rank in range(ranks)]
        self.processes = []
        for rank, path in enumerate(self._logs):
            told = json.dumps({**given, "store": store, "ranks": ranks, "rank": rank})
            command = [sys.executable, "-m", "benchmarks.faults.rank", told]
            with path.open("w") as log:
                self.processes.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stderr=log))

    def poll(self) -> bool:
        """Record the ranks that have ended. Return True when all have."""
        for rank, process in enumerate(self.processes):
            if self.codes[rank] is None:
                self.codes[rank], self.ended[rank] = process.poll(), time.monotonic()
        return None not in self.codes

    def last_words(self, rank: int) -> str:
        """Return the last line of a rank's stderr that says how it ended, or the end of its stderr."""
        log = self._logs[rank].read_text(errors="replace")
        return ([line for line in log.splitlines() if LAST_WORDS.search(line)] or [log[-500:]])[-1]


def watch(cases: list[Case], patience: int) -> list[Case]:
    """Wait until all ranks have ended, for at most ``patience`` seconds, and then kill those that still run."""
    until = time.monotonic() + patience
    while sum(case.poll() for case in cases) < len(cases) and time.monotonic() < until:
        time.sleep(0.05)
    for process in (process for case in cases for process in case.processes):
        process.kill()
    return cases
