"""The duration of every test: the ten slowest files after a run, and all of it as JSON with ``--timings FILE``.

The longest files run first, by ``seconds.json``, which holds the seconds of ``make test`` and of ``make test-all``. If it is out
of date, the workers end less evenly. To renew the part that FILE is of:

    python -m parity_tests.support.timings FILE test-all
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

SLOWEST = 10

SECONDS = Path(__file__).with_name("seconds.json")
UNKNOWN = 2
"""The seconds of a file that is not in ``seconds.json``: it is new, or shorter than this."""


def read_seconds(target: str) -> dict[str, int]:
    """Return the seconds of each file that takes long, by its path, in ``target``: "test" or "test-all"."""
    return json.loads(SECONDS.read_text())[target]


class Timings:
    """A collector of the seconds of each test's phases. Register it where all reports arrive, not in a worker of xdist."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._tests: dict[str, dict[str, float]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests[report.nodeid][report.when or ""] = round(report.duration, 3)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        files = self.files()
        slowest = sorted(files.items(), key=lambda item: -sum(item[1].values()))[:SLOWEST]
        terminalreporter.section("the slowest files, in seconds of one process")
        for file, seconds in slowest:
            terminalreporter.write_line(f"{sum(seconds.values()):7.1f}  {file}  (setup {seconds['setup']:.1f})")
        if self._path:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            Path(self._path).write_text(json.dumps({"files": files, "tests": self._tests}, indent=1) + "\n")

    def files(self) -> dict[str, dict[str, float]]:
        """Return the seconds of setup, call and teardown of each file."""
        files: dict[str, dict[str, float]] = defaultdict(lambda: {"setup": 0.0, "call": 0.0, "teardown": 0.0})
        for nodeid, phases in self._tests.items():
            for phase, seconds in phases.items():
                files[nodeid.partition("::")[0]][phase] += seconds
        return files


if __name__ == "__main__":
    measured = json.loads(Path(sys.argv[1]).read_text())["files"]
    long = {file: seconds for file, phases in sorted(measured.items()) if (seconds := round(sum(phases.values()))) > UNKNOWN}
    SECONDS.write_text(json.dumps(json.loads(SECONDS.read_text()) | {sys.argv[2]: long}, indent=1) + "\n")
