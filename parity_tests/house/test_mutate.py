"""Every break of ``make mutate`` still finds the line that it breaks; that a test notices it, only ``make mutate`` says."""

from __future__ import annotations

from collections import Counter
from functools import cache

from ..mutate import ROOT, breaks


@cache
def text(file: str) -> str:
    return (ROOT / file).read_text()


def test_a_break_finds_its_line_once_and_its_test():
    for broken in breaks():
        assert broken.old != broken.new, broken.name
        assert text(broken.file).count(broken.old) == 1, broken.name
        file, _, test = broken.test.partition("::")
        assert f"def {test.partition('[')[0]}(" in text(file), broken.name


def test_no_two_breaks_share_a_name():
    assert not [name for name, times in Counter(b.name for b in breaks()).items() if times > 1]
