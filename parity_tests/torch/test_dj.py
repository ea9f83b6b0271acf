import pytest
from ..support.balanced import DIRECT_CASES
from ..support.cases import check
from .ring import run


@pytest.mark.parametrize("case", DIRECT_CASES, ids=str)
def test_dj(gloo, case):
    check(case, run(gloo, case))
