"""Runs other projects' tests that are installed or named, prints a table, and writes it into a page."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from textwrap import fill

from . import __doc__ as USAGE
from .suites import SUITES, Suite

ROOT = Path(__file__).parents[2]
MARK = "<!-- what follows is written by make suites -->"
Case = tuple[str, str, str]


def run(name: str, source: Path | None, given: argparse.Namespace) -> list[Case]:
    """Return the cases of one suite on one ring, run in a process of its own. A run that was ended goes on where it stood."""
    report = ROOT / "build" / "suites" / f"{name}-{given.ranks}.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    words = [name, str(source or ""), str(given.ranks), given.k, str(report)]
    ended = subprocess.run([sys.executable, "-m", "parity_tests.outside.one", *words], cwd=ROOT, check=False)
    cases = [tuple(each) for each in json.loads(report.read_text())] if report.is_file() else []
    if ended.returncode:
        return [*cases, (name, "failed", f"its process ended with status {ended.returncode}")]
    report.unlink(missing_ok=True)
    return cases


def describe(suite: Suite, cases: list[Case], ranks: int) -> list[str]:
    """Return the table's row of a suite, and a line for each reason."""
    count = Counter(outcome for _, outcome, _ in cases)
    numbers = [sum(count[outcome] for outcome in COUNTED), *(count[outcome] for outcome in (*COUNTED, "skipped"))]
    row = "| " + " | ".join([suite.release, suite.what, str(ranks), *map(str, numbers)]) + " |"
    reasons = Counter((outcome, suite.explain(case, reason)) for case, outcome, reason in cases if reason)
    lines = (f"- {outcome}, {number}: {reason}" for (outcome, reason), number in sorted(reasons.items()))
    return [row, *(fill(line, 138, subsequent_indent="  ", break_long_words=False) for line in lines)]


COUNTED = "passed", "refused", "failed"
HEAD = """| suite | ours in the place of theirs | ranks | cases | passed | refused | failed | skipped |
|---|---|---|---|---|---|---|---|"""


def main() -> int:
    parser = argparse.ArgumentParser(description=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}; all that can run without a name")
    parser.add_argument("--source", action="append", default=[], metavar="SUITE=FOLDER", help="a checkout with its tests")
    parser.add_argument("--ranks", type=int, default=1, help="devices of the ring, in the suites of JAX")
    parser.add_argument("-k", default="", metavar="WORDS", help="as in pytest: a part of the cases")
    parser.add_argument("--page", type=Path, help="write the table into this page, after its mark")
    given = parser.parse_args()
    sources = {name: Path(folder).resolve() for name, _, folder in (each.partition("=") for each in given.source)}
    if unknown := [*({*given.suites, *sources} - {*SUITES})]:
        parser.error(f"unknown suite {unknown[0]}: choose {', '.join(SUITES)}")
    rows, reasons, failed = [], [], False
    for name in given.suites or SUITES:
        suite, source = SUITES[name], sources.get(name)
        if obstacle := suite.obstacle(source):
            print(f"left out: {name}: {obstacle}")
            continue
        cases = run(name, source, given)
        row, *found = describe(suite, cases, given.ranks)
        rows.append(row)
        reasons += [f"\n**{name}**\n", *found] if found else []
        failed |= any(outcome == "failed" and not suite.explain(case, "") for case, outcome, _ in cases)
    table = "\n".join([HEAD, *rows, *reasons]) if rows else "no suite could run"
    print(table)
    if given.page and rows:
        text = given.page.read_text(encoding="utf-8").partition(MARK)[0]
        given.page.write_text(f"{text}{MARK}\n\n{table}\n", encoding="utf-8")
    return int(failed or not rows)


if __name__ == "__main__":
    raise SystemExit(main())
