"""A sequence of odd length and cotangents of it that differ between ranks, in numpy."""

from __future__ import annotations

import numpy as np

from ring_attn_core.plan.balanced import balanced_layout

LENGTH = 13
ROWS = np.array([12, 3, LENGTH])
"""A position for each row; the last one is padding, or held by no rank."""


DEALT = balanced_layout((2, 6, 1, 4), 3, seq_local=5)
"""A layout of LENGTH tokens and 2 of padding over three ranks."""


def sequence(ranks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x [3, LENGTH, 2, 3], and the ranks' cotangents of the whole [ranks, *x.shape] and of a token [ranks, 3, 2, 3]."""
    rng = np.random.default_rng(ranks)
    x, *dwhole = rng.standard_normal((1 + ranks, 3, LENGTH, 2, 3)).astype(np.float32)
    return x, np.stack(dwhole), rng.standard_normal((ranks, 3, 2, 3)).astype(np.float32)
