"""What a block keeps of its forward pass for its backward: the choices that the transformers of both packages take."""

from __future__ import annotations

ACTIVATIONS = ("keep", "recompute", "offload")
"""Everything; the block's input and attention's (out, lse), from which the rest is computed again; these in host memory."""


def check_activations(activations: str) -> None:
    """ValueError for what is none of the choices."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations must be one of {', '.join(ACTIVATIONS)}, got {activations!r}")
