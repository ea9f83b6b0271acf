"""The kernels in a balanced layout, in Triton's interpreter: each shard is one run, its documents extents in local indices."""

from __future__ import annotations

import pytest

from ..support.balanced import KERNEL_CASES
from ..support.cases import check
from ..support.selection import first
from .test_kernels import run

pytest.importorskip("triton")


SMALL_RINGS_FIRST = sorted(KERNEL_CASES, key=lambda case: case.ranks > 3)
"""The interpreter's pool has three processes, and four with --full."""


@pytest.mark.slow
@pytest.mark.parametrize("case", first(SMALL_RINGS_FIRST, 1, 4), ids=str)
def test_kernels_in_a_balanced_layout_are_exact(interpreter, case):
    check(case, run(interpreter, case))
