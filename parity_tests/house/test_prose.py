"""The prose of the house keeps the rules of prose.py; older findings stand in prose_baseline.txt, which may only shrink."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .prose import absent_files, banned, findings, judged, paths_in, raised

BASELINE = Path(__file__).with_name("prose_baseline.txt")


def test_no_finding_is_new_and_none_of_the_baseline_is_gone():
    found, known = set(findings()), set(BASELINE.read_text(encoding="utf-8").splitlines())
    new, mended = "\n".join(sorted(found - known)), "\n".join(sorted(known - found))
    assert new == "", f"rewrite these, subject, verb, object, in the words of the field (CONTRIBUTING.md):\n{new}"
    assert mended == "", f"these are mended: take them out of prose_baseline.txt:\n{mended}"


def test_every_file_that_a_docstring_names_exists():
    assert absent_files() == [], "these were moved or renamed: name the file that has their content now"


def test_paths_are_found_in_a_sentence():
    text = "See ``ring/step.py`` and README.md (loop.py); not ``python file.py``."
    assert paths_in(text) == ["ring/step.py", "README.md", "loop.py"]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("What of a model fits into memory.", "begins with What"),
        ("Return the tile size. Where there is none, 0.", "a sentence begins with What, Who, Where"),
        ("Check the mask; ValueError where it is wide.", "ValueError for, ValueError where"),
        ("Return the ranks. A rank that is no member is left out.", "is no, are no"),
        ("Return " + "the sum of " * 9 + "all.", "more than 25 words"),
        ("Return the keys that nobody sees.", "nobody, whoever"),
        ("test_what_does_not_fit_is_refused", "begins with What"),
        ("test_a_rank_that_is_none_is_refused", "is none, are none"),
    ],
)
def test_a_sentence_that_breaks_a_rule_is_found(text: str, rule: str):
    assert [found for found in judged(text) if rule in found]


def test_an_error_that_breaks_a_rule_of_words_is_found():
    (text,) = raised(ast.parse("raise ValueError(f'{path} is no folder: pass one')"))
    assert text == "... is no folder: pass one" and [*banned(text)] == ["has a banned phrase: is no, are no, was no"]


def test_plain_sentences_are_not_found():
    text = "Return the padded size of a tile.\n\nRaise ValueError if it is not a power of two. It is no longer split."
    assert not list(judged(text))
