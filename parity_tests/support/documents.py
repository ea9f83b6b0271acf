"""Documents packed into one sequence, and the same documents one by one, which must give the same attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ring_attn_core.reference.oracle import Attention
from ring_attn_core.reference.tolerance import relative_error

from .cases import Case

DOCUMENTS = (7, 1, 19, 8)
"""The lengths of the documents in tokens; padding follows, fully masked as queries and as keys."""


def packed(case: Case) -> Case:
    """Return the same case with DOCUMENTS packed into its sequences."""
    ends = np.cumsum(DOCUMENTS)
    spans = np.stack([ends - DOCUMENTS, ends], -1).repeat(DOCUMENTS, 0)
    spans = np.concatenate([spans, np.zeros((case.length - len(spans), 2), int)]).astype(np.int32)
    return replace(case, extents="documents").given(extents=np.broadcast_to(spans, (case.batch, *spans.shape)).copy())


def check_documents(run: Callable[[Case], Attention], case: Case) -> None:
    """Assert that a packed case equals its documents one by one, on one rank: the same zeros, and 1e-6 in norm otherwise."""
    whole = run(case)
    alone = [run(document) for document in one_by_one(case)]
    for name, *pieces in zip(Attention._fields[:5], *(got[:5] for got in (whole, *alone)), strict=True):
        of_documents = np.concatenate([x[:, :n] for x, n in zip(pieces[1:], DOCUMENTS, strict=True)], 1)
        mine, rest = np.split(pieces[0], [sum(DOCUMENTS)], 1)
        np.testing.assert_array_equal(mine == 0, of_documents == 0, err_msg=name)
        np.testing.assert_array_equal(rest, -np.inf if name == "lse" else 0, err_msg=name)
        assert relative_error(mine, of_documents) <= 1e-6, name


def one_by_one(case: Case) -> list[Case]:
    ends = np.cumsum(DOCUMENTS)
    return [
        replace(case, ranks=1, length=n, extents=None, own={}).given(
            **{name: x[:, end - n : end] for name, x in case.arrays.items()}
        )
        for n, end in zip(DOCUMENTS, ends, strict=True)
    ]
