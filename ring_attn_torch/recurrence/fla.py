"""The kernels of flash-linear-attention, which compute each run of a gated delta rule; what ranks exchange stays ours.

A run is one call of theirs, on the values with K columns of 0 and from the state [0 | I], as in ``delta_rule.py``. Documents
inside a run need no cu_seqlens, which a host must know: their first token forgets the state by a decay that is 0 in float32.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ring.halo import wide

FORGETS = -110.0
"""The log of a decay that is 0 in float32."""
WIDEST = 256
"""The largest K of their kernels."""


def check_fla(k: Tensor, v: Tensor, g: Tensor, documents: bool) -> None:
    """Raise ValueError if the kernels are missing or cannot compute a call."""
    why = None
    if find_spec("fla") is None:
        why = "the package is missing: pip install flash-linear-attention"
    elif v.device.type != "cuda":
        why = f"v is on the device {v.device.type}, and the kernels run on GPUs"
    elif v.dtype == torch.float64:
        why = "the kernels compute float32 and 16 bits, and v is float64"
    elif k.shape[-1] > WIDEST:
        why = f"the kernels have up to {WIDEST} features a head, got {k.shape[-1]}"
    elif g.ndim == 4 and documents:
        why = "with a decay for each channel the kernels know no packed documents without values on the host"
    if why:
        raise ValueError(f'backend="fla": {why}; or leave backend out')


def first_state(v: Tensor, size: int, columns: int) -> Tensor:
    """Return [0 | I], [batch, heads, K, columns]: as many columns of 0 as v has, and then of the unit matrix."""
    state = F.pad(torch.eye(size, dtype=torch.promote_types(v.dtype, torch.float32), device=v.device), (v.shape[-1], 0))
    return state[:, :columns].expand(v.shape[0], v.shape[2], -1, -1)


def run_of_fla(dtype: torch.dtype, arrays: list[Tensor], documents: Tensor | None, effect: bool) -> tuple[Tensor, Tensor]:
    """Return what ``_run`` of ``delta_rule.py`` returns, computed by the kernels in ``dtype``."""
    q, k, v, g, beta = arrays
    if documents is not None:
        begins = F.pad(documents.diff() != 0, (1, 0))
        g = torch.where(begins.view(*begins.shape, *[1] * (g.ndim - 2)), FORGETS, g)
    size = k.shape[-1]
    values = F.pad(v, (0, size)) if effect else v
    state = first_state(v, size, values.shape[-1]).contiguous() if effect else None
    arrays = [*(x.to(dtype).contiguous() for x in (q, k, values)), g.contiguous(), beta.contiguous()]
    out, end = kernel(g.ndim)(*arrays, scale=1.0, initial_state=state, output_final_state=True)
    return wide(out), end


def kernel(dims: int) -> Any:
    """Return the function for a decay for each head or, if g has 4 dims, for each channel."""
    name, function = ("kda", "chunk_kda") if dims == 4 else ("gated_delta_rule", "chunk_gated_delta_rule")
    return getattr(importlib.import_module(f"fla.ops.{name}"), function)
