"""Weights as numpy arrays, under the same names and in the same orientation in both packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from ring_attn_core.model.weight_names import check_state

Module = TypeVar("Module", bound=nn.Module)


def to_numpy(module: nn.Module) -> dict[str, np.ndarray]:
    """The parameters of a module as copies in numpy, by dotted name, such as ``blocks.0.attention.q.weight`` [out, in].

    bfloat16 and float16 come as float32. ``from_numpy`` of either package reads them.
    """
    state = {}
    for name, p in module.named_parameters():
        state[name] = p.detach().to("cpu", torch.promote_types(p.dtype, torch.float32), copy=True).numpy()
    return state


def from_numpy(module: Module, state: Mapping[str, np.ndarray]) -> Module:
    """Set the parameters of ``module``, each in its own dtype, to what ``to_numpy`` of either package gave; returns ``module``.

    Raises ValueError that lists what is missing, unexpected or of another shape, and then changes nothing.
    """
    parameters = dict(module.named_parameters())
    check_state({name: p.shape for name, p in parameters.items()}, {name: np.shape(x) for name, x in state.items()})
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(torch.tensor(np.asarray(state[name])))
    return module
