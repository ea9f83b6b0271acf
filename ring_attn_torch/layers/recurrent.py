"""The parts that GatedDeltaNet and Mamba2 share: constructor arguments, the convolution's weights and the decay's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ring_attn_core.constructor import extract
from ring_attn_core.model.mixers import first_decays
from ring_attn_core.plan.balanced_layout import BalancedLayout

from ..attend.tiles import accumulation_dtype
from ..call.prepare import dtype_name
from ..recurrence.convolution import causal_conv
from ..ring.agreement import same_error
from ..ring.groups import ring_of
from .ring import LayerRing


@dataclass(frozen=True, kw_only=True)
class RecurrentArguments(LayerRing):
    """The constructor arguments of both layers: ``dim`` and ``heads`` by position, a dtype in place of its name, the ring."""

    dim: int = field(kw_only=False)
    heads: int = field(kw_only=False)
    param_dtype: torch.dtype | str = "float32"
    strategy: str = field(default="auto", init=False)
    order: str = field(default="ring", init=False)
    backend: str = field(default="auto", init=False)
    deterministic: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "param_dtype", dtype_name(self.param_dtype))


class Recurrent(nn.Module):
    """The base of both layers: the ring, and the parameters ``conv1d``, ``dt_bias`` and ``A_log``."""

    _rule: ClassVar[Callable[..., Tensor]]
    """The recurrence over a ring, of ``where`` and its arrays in their order."""

    def __init__(self, arguments: RecurrentArguments, config: Any, conv_bias: bool) -> None:
        super().__init__()
        self.config, self.ring = config, extract(LayerRing, arguments)
        self.conv1d = Taps(sum(config.parts), config.taps, conv_bias, config.param_dtype)
        wide = accumulation_dtype(getattr(torch, config.param_dtype))
        decays = {name: nn.Parameter(torch.tensor(x, dtype=wide)) for name, x in first_decays(config.heads).items()}
        self.dt_bias, self.A_log = decays["dt_bias"], decays["A_log"]

    def forward(
        self,
        x: Tensor,
        length: int | None = None,
        *,
        extents: Tensor | None = None,
        layout: BalancedLayout | None = None,
    ) -> Tensor:
        """Apply the layer to x [b s dim], this rank's shard in layout order; return [b s dim].

        ``length``: the global number of tokens without padding, if the shards hold padding. ``extents``: [b s 2], the shard of
        ``document_extents``; each document begins with the state 0. ``layout``: the ``.layout`` of a balanced shard. Raise
        ValueError if x has a wrong shape, or as the layer's recurrence does.
        """
        self.check(x)
        where = self.where(length, extents, layout)
        return self.mix(x, partial(causal_conv, activation="silu", **where), partial(type(self)._rule, where))

    def check(self, x: Tensor) -> None:
        if x.ndim != 3 or x.shape[-1] != self.config.dim:
            with same_error(ring_of(self.ring.group)):
                raise ValueError(f"x must be [batch, tokens, {self.config.dim}], got {list(x.shape)}")

    @abstractmethod
    def mix(self, x: Tensor, convolve: Callable[..., Tensor], recur: Callable[..., Tensor]) -> Tensor:
        """Return the output for x [b s dim], by ``convolve(y, weight, bias)`` with silu and ``recur(*arrays)``."""

    def where(self, length: int | None, extents: Tensor | None, layout: BalancedLayout | None) -> dict[str, Any]:
        return {"group": self.ring.group, "layout": layout or self.ring.layout, "length": length, "extents": extents}


class Taps(nn.Module):
    """The weights of a convolution of each channel alone, as torch.nn.Conv1d holds them: ``weight`` [channels, 1, taps], and
    ``bias`` or None. The weight is drawn from a normal distribution with standard deviation ``taps ** -0.5``."""

    def __init__(self, channels: int, taps: int, bias: bool, param_dtype: str) -> None:
        super().__init__()
        dtype = getattr(torch, param_dtype)
        self.weight = nn.Parameter(taps**-0.5 * torch.randn(channels, 1, taps, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, dtype=dtype)) if bias else None

    def like(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return weight [channels, taps] and bias in x's dtype."""
        return self.weight[:, 0].to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
