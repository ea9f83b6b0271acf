"""ALiBi's slopes, one per head."""

from __future__ import annotations

from typing import Any

from .checks import check_sizes


def alibi_slopes(heads: int, head: Any = None) -> Any:
    """Return ALiBi's slope of each head h (Press et al., arXiv:2108.12409, section 3), as a tuple of floats.

        slope_h = 2 ** (-8 (h + 1) / p)            if h < p; p is the greatest power of two that is at most heads
        slope_h = 2 ** (-8 (h - p + 1/2) / p)      if h >= p: between the slopes above, as in the authors' released code

    ``head``: None, or the float64 array 0, 1, ... heads - 1 of any framework; then return the slopes as an array like ``head``.
    Raise ValueError if ``heads`` is not an int of at least 1.
    """
    check_sizes(heads=heads)
    if head is None:
        return tuple(alibi_slopes(heads, head) for head in range(heads))
    power = 1 << (heads.bit_length() - 1)
    return 2.0 ** (-8 / power * (head + 1 - head // power * (power + 0.5)))
