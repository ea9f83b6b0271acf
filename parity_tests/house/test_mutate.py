"""Every break of ``make mutate`` still finds the line that it breaks; that a test notices it, only ``make mutate`` says."""

from __future__ import annotations

from collections import Counter

import pytest

from ..mutate import ROOT, Break, breaks


@pytest.mark.parametrize("broken", breaks(), ids=lambda broken: broken.name)
def test_a_break_finds_its_line_once(broken: Break):
    assert broken.old != broken.new
    assert (ROOT / broken.file).read_text().count(broken.old) == 1
    file, _, test = broken.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()


def test_no_two_breaks_share_a_name():
    assert not [name for name, times in Counter(b.name for b in breaks()).items() if times > 1]
