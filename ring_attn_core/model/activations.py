"""The activation settings of a transformer block: the values that it keeps from its forward for its backward."""

from __future__ import annotations

ACTIVATIONS = ("keep", "recompute", "offload")
"""Keep all; keep the block's input and attention's (out, lse) and recompute the rest; keep these in host memory."""


def check_activations(activations: str) -> None:
    """Raise ValueError if ``activations`` is not one of ACTIVATIONS."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations must be one of {', '.join(ACTIVATIONS)}, got {activations!r}")
