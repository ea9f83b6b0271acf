"""``make newest`` reads, compares and writes lock files, and CI goes by these alone."""

from __future__ import annotations

import re
from pathlib import Path

from .. import newest

LOCK = newest.ROOT / "requirements" / "newest-py313.txt"
FREEZE = (
    "torch==2.16.0+cpu\nnvidia-cublas-cu12==12.9\njax-cuda12-plugin==0.12.0.1\nring-attn==0.1.0\nJinja2==3.2.0\nabsl-py==2.5.1\n"
)


def test_the_versions_that_pip_finds_are_reported_beside_the_pins():
    pinned = newest.pins("# a comment==1\ntorch==2.15.0\nabsl-py==2.5.1\ntoolz==1.2.0\n")
    found = newest.pins(FREEZE)
    assert found == {"torch": "2.16.0", "Jinja2": "3.2.0", "absl-py": "2.5.1"}
    rows = [line.split() for line in newest.report(Path("lock.txt"), pinned, found).splitlines()]
    assert rows[:4] == [
        ["package", "pinned", "found"],
        ["Jinja2", "-", "3.2.0"],
        ["toolz", "1.2.0", "-"],
        ["torch", "2.15.0", "2.16.0"],
    ]
    assert newest.report(Path("lock.txt"), found, found) == "3 packages are found as lock.txt pins them"


def test_a_lock_is_written_as_it_is_read():
    text = LOCK.read_text()
    assert newest.locked(text, newest.pins(text)) == text
    written = newest.locked(text, newest.pins(FREEZE))
    assert written.startswith(text[: text.index("absl-py")])
    assert written.endswith("absl-py==2.5.1\nJinja2==3.2.0\ntorch==2.16.0\n")


def test_the_tests_that_are_run_are_there():
    assert len({*newest.TESTS}) == len(newest.TESTS)
    missing = [name for name in newest.TESTS if not (newest.ROOT / "parity_tests" / name).is_file()]
    assert not missing


def test_ci_takes_its_versions_from_lock_files_only():
    ci = (newest.ROOT / ".ci" / "run").read_text()
    environments = re.findall(r"^\w+=\(make .*\)$", ci, re.MULTILINE)
    assert len(environments) == 2
    for each in environments:
        pins = re.search(r"PINS=(\S+)\)", each)
        assert pins and (newest.ROOT / pins[1]).is_file(), each
    assert "pip install" not in ci and "newest newest" not in ci
