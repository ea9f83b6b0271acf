"""Runs one suite with pytest and records what became of each case.

    python -m parity_tests.outside.one SUITE SOURCE RANKS WORDS REPORT

``in_place`` is what the suites' modules call.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .suites import SUITES

HERE = Path(__file__).parent
OURS = tuple(str(HERE.parent.parent / name) for name in ("ring_attn_core", "ring_attn_jax", "ring_attn_torch"))


@dataclass
class Settings:
    """``source``: the user's checkout. ``calls``: how often the running case has called our function."""

    source: Path = Path()
    ranks: int = 1
    calls: int = 0


SETTINGS = Settings()


def read(name: str, replaced: tuple[str, str] = ("", "")) -> Any:
    """Return the compiled text of a file of the user's checkout. ``replaced``: words of it, and ours in their place."""
    path = SETTINGS.source / name
    text = path.read_text(encoding="utf-8")
    return compile(text.replace(*replaced) if replaced[0] else text, str(path), "exec")


def in_place(function: Any, *arguments: Any, **keywords: Any) -> Any:
    """Call one of our functions for a suite, and count it."""
    SETTINGS.calls += 1
    return function(*arguments, **keywords)


class Recorder:
    """A plugin of pytest: (case, outcome, reason) in ``report``, after each case. A run that was ended goes on from there.
    The outcome of a case that passes and never calls our function is "theirs". The first rank writes the report, all read it."""

    def __init__(self, report: Path) -> None:
        self._report = report
        self._writes = os.environ.get("RANK", "0") == "0"
        self._found: list[tuple[str, str, str]] = json.loads(report.read_text()) if report.is_file() else []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        done = {case for case, _, _ in self._found}
        items[:] = [item for item in items if _name(item) not in done]

    def pytest_runtest_setup(self) -> None:
        SETTINGS.calls = 0
        random.seed(0)  # the ranks draw the same tensors
        if torch := sys.modules.get("torch"):
            torch.manual_seed(0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[Any]:
        report = yield
        if call.when == "call":
            outcome, reason = _judge(call.excinfo.value) if call.excinfo else ("passed" if SETTINGS.calls else "theirs", "")
            if report.outcome == "skipped" and call.excinfo:
                outcome, reason = "skipped", str(call.excinfo.value)
            self._found.append((_name(item), outcome, reason))
            if self._writes:
                self._report.write_text(json.dumps(self._found))
        return report


def _name(item: Any) -> str:
    return item.nodeid.partition("::")[2]


def _judge(error: BaseException) -> tuple[str, str]:
    """Return "refused" with our words if our code raised the error on purpose, else "failed" with the first words of it."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    raised = at.tb_frame.f_code.co_filename if at else ""
    text = re.sub(r"^rank \d+: ", "", " ".join(str(error).split()))
    if isinstance(error, ValueError | TypeError) and raised.startswith(OURS):
        return "refused", re.split(r": |\. ", text)[0][:160]
    return "failed", f"{type(error).__name__}: {text[:160]}"


def main(name: str, source: str, ranks: str, words: str, report: str) -> int:
    suite, recorder = SUITES[name], Recorder(Path(report))
    os.environ["JAX_NUM_CPU_DEVICES"] = ranks
    sys.modules["parity_tests.outside.one"] = sys.modules[__name__]  # the suite's module must find these settings
    SETTINGS.source, SETTINGS.ranks = Path(source), int(ranks)
    selected = " and ".join(f"({each})" for each in (suite.select, words) if each)
    options = [
        "--noconftest",
        "-qq",  # its last line would call refused cases failed
        "--tb=native",
        "--no-header",
        "--no-summary",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "-k",
        selected,
    ]
    ended = pytest.main([str(HERE / f"{suite.module}.py"), *options, "-o", "python_files=*.py", "-W", "ignore"], [recorder])
    judged = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED
    return 0 if ended in judged else int(ended)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
