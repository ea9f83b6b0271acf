"""Every break of ``make mutate`` still finds the line that it breaks; that a test notices it, only ``make mutate`` says."""

from __future__ import annotations

import pytest

from ..mutate import BREAKS, ROOT, Break


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.name)
def test_a_break_finds_its_line_once(broken: Break):
    assert (ROOT / broken.file).read_text().count(broken.old) == 1
    file, _, test = broken.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()
