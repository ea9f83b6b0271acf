"""Activation settings of a transformer block: the arrays that its forward stores for its backward."""

from __future__ import annotations

ACTIVATIONS = ("keep", "recompute", "offload")
"""The choices of activations that a block keeps for its backward.

With "keep": all activations. With "recompute": only the block's input and attention's (out, lse); the backward computes the rest
again. With "offload": the same arrays as with "recompute", but in host memory.
"""


def check_activations(activations: str) -> None:
    """Raise ValueError if ``activations`` is not one of ACTIVATIONS."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations must be one of {', '.join(ACTIVATIONS)}, got {activations!r}")
