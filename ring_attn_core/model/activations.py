"""The argument ``activations`` of a transformer: it chooses the arrays that a block's forward stores for the backward."""

from __future__ import annotations

ACTIVATIONS = ("keep", "recompute", "offload")
"""The choices for the activations that a block stores for its backward.

With "keep" a block stores all activations. With "recompute" it stores only its input and attention's (out, lse), and the backward
computes the other activations again. With "offload" it stores the arrays of "recompute" in host memory.
"""


def check_activations(activations: str) -> None:
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations must be one of {', '.join(ACTIVATIONS)}, got {activations!r}")
