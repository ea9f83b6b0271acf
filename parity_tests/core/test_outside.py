"""The runner of other projects' tests: what it calls passed, refused and failed, and what it says of a missing suite."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from parity_tests.outside import __main__ as runner
from parity_tests.outside import one, suites
from parity_tests.outside.__main__ import MARK, describe, earlier, table
from ring_attn_core.layouts import find_layout

TESTS = """
from parity_tests.outside.one import in_place
from ring_attn_core.layouts import find_layout
import pytest, unittest

def test_ours(): assert in_place(find_layout, "zigzag")
def test_theirs(): pass
def test_wrong(): assert in_place(len, "a") == 2
def test_their_mistake(): int("x")
@pytest.mark.skip(reason="no GPU")
def test_skipped(): pass
def test_skips_itself(): pytest.skip("too slow")

class Cases(unittest.TestCase):
    def test_refused(self): in_place(find_layout, "spiral")
"""
FOUND = {
    "test_ours": "passed",
    "test_theirs": "theirs",
    "test_wrong": "failed",
    "test_their_mistake": "failed",
    "test_skips_itself": "skipped",
    "Cases::test_refused": "refused",
}


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> suites.Suite:
    """A suite of our own, with a case of every kind."""
    (tmp_path / "own.py").write_text(TESTS)
    suite = suites.Suite("own", "pytest", known={"wrong": "the suite takes one character for two"})
    monkeypatch.setattr(one, "HERE", tmp_path)
    monkeypatch.setitem(suites.SUITES, "own", suite)
    return suite


@pytest.mark.slow
def test_every_case_is_judged_by_who_raised_and_a_run_that_ended_goes_on(suite: suites.Suite, tmp_path: Path):
    report = tmp_path / "report.json"
    assert one.main("own", "", "1", "wrong or theirs", str(report)) == 0
    assert {case for case, *_ in json.loads(report.read_text())} == {"test_wrong", "test_theirs"}
    assert one.main("own", "", "1", "", str(report)) == 0
    cases = [tuple(each) for each in json.loads(report.read_text())]
    assert {case: outcome for case, outcome, _ in cases} == FOUND and len(cases) == len(FOUND)
    with pytest.raises(ValueError, match="unknown layout") as refusal:
        find_layout("spiral")
    reasons = {case: reason for case, _, reason in cases}
    assert reasons["Cases::test_refused"] and str(refusal.value).startswith(reasons["Cases::test_refused"])
    row, *lines = describe("own", cases, 1)
    assert row == f"| own | {pytest.__version__} | 1 | 4 | 1 | 1 | 2 | 1 |"
    assert "- failed, 1: the suite takes one character for two" in lines and "- skipped, 1: too slow" in lines


def test_a_suite_that_is_not_there_is_left_out_in_words(tmp_path: Path):
    jax = suites.SUITES["jax"]
    installed = suites.Suite("own", "pytest", "tests/nn_test.py")
    assert suites.Suite("own", "no_such_package").obstacle(None) == "no_such_package is not installed"
    assert suites.Suite("own", "pytest", needs=("no_such_package",)).obstacle(None) == "no_such_package is not installed"
    assert installed.obstacle(None) == "it stands in a checkout: pass --source NAME=FOLDER, which holds tests/nn_test.py"
    assert installed.obstacle(tmp_path) == f"{tmp_path} holds no tests/nn_test.py"
    assert jax.file == "tests/nn_test.py"


def test_a_page_keeps_what_earlier_runs_wrote_and_rings_that_say_the_same_share_their_reasons():
    row = lambda name, ranks: f"| {name} | 1.0 | {ranks} | 3 | 1 | 2 | 0 | 1 |"
    bias = describe("jax", [(f"test_{n}", "refused", f"bias of shape [{n}, 2]") for n in (1, 2)], 1)[1:]
    assert bias == ["- refused, 2: bias of shape [...]"]
    folded = describe("torch", [("test", "refused", "words " * 40)], 2)[1:]
    found = {"jax-4": [row("jax", 4)], "jax-2": [row("jax", 2), *bias], "jax-1": [row("jax", 1), *bias]}
    found["tokamax-2"] = [row("tokamax", 2), *folded, "- skipped, 1: slow"]
    page = table(found)
    assert len(folded) == 2 and page.splitlines()[2:6] == [row("tokamax", 2), *(row("jax", ranks) for ranks in (1, 2, 4))]
    assert page.splitlines()[6:] == [
        *("", "**tokamax, ranks: 2**", "", *found["tokamax-2"][1:]),
        *("", "**jax, ranks: 1, 2**", "", *bias),
    ]
    assert earlier(f"Prose.\n\n{MARK}\n\n{page}\n") == found and earlier("Prose.\n") == {}


def test_a_part_of_a_suite_leaves_a_whole_run_that_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "BUILD", tmp_path)
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=0)))
    whole = tmp_path / "jax-1.json"
    whole.write_text('[["a", "passed", ""]]')
    assert runner.run("jax", None, 1, "words") == [] and whole.is_file()
    assert runner.run("jax", None, 1, "") == [("a", "passed", "")] and not whole.is_file()
