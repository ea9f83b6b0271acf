"""Runs a case of parity_tests/support/dilated.py on a rank of PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ring_attn_torch import dilated_attention


def on_rank(
    group: Any, dtype: str, arguments: dict[str, Any], shards: dict[str, np.ndarray], device: str = "cpu"
) -> list[np.ndarray]:
    """One rank's out, lse, dq, dk, dv."""
    arrays = {name: torch.from_numpy(np.ascontiguousarray(x)).to(device) for name, x in shards.items()}
    key_mask, dlse = arrays.pop("key_mask", None), arrays.pop("dlse")
    q, k, v, dout = (x.to(getattr(torch, dtype)) for x in arrays.values())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dilated_attention(*leaves, group=group, key_mask=key_mask, **arguments, return_lse=True)
    gradients = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    wide = torch.promote_types(out.dtype, torch.float32)
    return [x.detach().to(wide).cpu().numpy() for x in (out, lse, *gradients)]
