"""Runs other projects' tests that are installed or named, prints a table, and writes it into a page."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from textwrap import fill

from . import __doc__ as USAGE
from .suites import SUITES

ROOT = Path(__file__).parents[2]
MARK = "<!-- what follows is written by make suites -->"
Case = tuple[str, str, str]


def run(name: str, source: Path | None, ranks: int, words: str) -> list[Case]:
    """Return the cases of one suite on one ring, run in processes of its own. A whole run that was ended goes on from there."""
    report = BUILD / f"{name}-{ranks}{'-part' * bool(words)}.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    if words:
        report.unlink(missing_ok=True)
    launcher = [*LAUNCHER, f"--nproc-per-node={ranks}"] if SUITES[name].processes else []
    arguments = [name, str(source or ""), str(ranks), words, str(report)]
    command = [sys.executable, *launcher, "-m", "parity_tests.outside.one", *arguments]
    ended = subprocess.run(command, cwd=ROOT, check=False)
    cases = [tuple(each) for each in json.loads(report.read_text())] if report.is_file() else []
    if ended.returncode:
        return [*cases, (name, "failed", f"its process ended with status {ended.returncode}")]
    report.unlink(missing_ok=True)
    return cases


def describe(name: str, cases: list[Case], ranks: int, source: Path | None = None) -> list[str]:
    """Return the table's row of a suite, and a line for each reason."""
    suite = SUITES[name]
    count = Counter(outcome for _, outcome, _ in cases)
    numbers = [sum(count[outcome] for outcome in COUNTED), *(count[outcome] for outcome in (*COUNTED, "skipped"))]
    row = "| " + " | ".join([name, suite.release(source), *map(str, (ranks, *numbers))]) + " |"
    reasons = Counter((outcome, suite.explain(case, reason)) for case, outcome, reason in cases if reason)
    lines = (f"- {outcome}, {number}: {reason}" for (outcome, reason), number in sorted(reasons.items()))
    folded = (fill(line, 138, subsequent_indent="  ", break_long_words=False) for line in lines)
    return [row, *chain(*map(str.splitlines, folded))]


def table(found: dict[str, list[str]]) -> str:
    """Return the rows in the order of ``SUITES``, and below them the reasons. ``found``: by SUITE-RANKS, what describe says."""
    names = sorted(found, key=lambda name: ([*SUITES].index(name.rpartition("-")[0]), int(name.rpartition("-")[2])))
    rings: dict[tuple[str, ...], list[str]] = {}  # those of a suite that say the same share a title
    for name in names:
        suite, _, ranks = name.rpartition("-")
        rings.setdefault((suite, *found[name][1:]), []).append(ranks)
    reasons = (["", f"**{suite}, ranks: {', '.join(ranks)}**", "", *lines] for (suite, *lines), ranks in rings.items() if lines)
    return "\n".join([HEAD, *(found[name][0] for name in names), *chain(*reasons)])


def earlier(page: str) -> dict[str, list[str]]:
    """Return what a page says, as ``table`` takes it."""
    rows, *sections = page.partition(MARK)[2].split("\n**")
    cells = {row: row.split(" | ") for row in rows.splitlines()[4:]}
    found = {f"{name[2:]}-{ranks}": [row] for row, (name, _, ranks, *_) in cells.items()}
    for section in sections:
        title, _, lines = section.partition("**\n\n")
        suite, _, ranks = title.partition(", ranks: ")
        for each in ranks.split(", "):
            found.get(f"{suite}-{each}", []).extend(lines.strip().splitlines())
    return found


BUILD = ROOT / "build" / "suites"
LAUNCHER = "-m", "torch.distributed.run", "--standalone", "--local-ranks-filter=0"
COUNTED = "passed", "refused", "failed"
HEAD = """| suite | release | ranks | cases | passed | refused | failed | skipped |
|---|---|---|---|---|---|---|---|"""


def main() -> int:
    parser = argparse.ArgumentParser(description=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}; all that can run without a name")
    parser.add_argument("--source", action="append", default=[], metavar="SUITE=FOLDER", help="a checkout with its tests")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="devices, or processes, of the ring")
    parser.add_argument("-k", default="", metavar="WORDS", help="as in pytest: a part of the cases")
    parser.add_argument("--page", type=Path, help="write this table into a page, after its mark, and keep its other rows")
    given = parser.parse_args()
    sources = {name: Path(folder).resolve() for name, _, folder in (each.partition("=") for each in given.source)}
    if unknown := [*({*given.suites, *sources} - {*SUITES})]:
        parser.error(f"unknown suite {unknown[0]}: choose {', '.join(SUITES)}")
    found, failed = {}, False
    for name in given.suites or SUITES:
        suite, source = SUITES[name], sources.get(name)
        if obstacle := suite.obstacle(source):
            print(f"left out: {name}: {obstacle}")
            continue
        for ranks in given.ranks:
            cases = run(name, source, ranks, given.k)
            found[f"{name}-{ranks}"] = described = describe(name, cases, ranks, source)
            print(*described, sep="\n", flush=True)
            failed |= any(outcome == "failed" and not suite.explain(case, "") for case, outcome, _ in cases)
    if given.page and found and not given.k:
        text = given.page.read_text(encoding="utf-8")
        given.page.write_text(f"{text.partition(MARK)[0]}{MARK}\n\n{table(earlier(text) | found)}\n", encoding="utf-8")
    return int(failed or not found)


if __name__ == "__main__":
    raise SystemExit(main())
