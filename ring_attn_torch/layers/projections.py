"""The base of the attention layers: projections, head norms, rotary embeddings and the ring."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.model.config import AttentionConfig
from ring_attn_core.problem.options import Options

from ..data.layout import positions as positions_of
from ..ring.agreement import same_error
from ..ring.groups import Group, constant, group_name, group_of, rank_in, ranks_of
from .parts import LinearMap, RMSNorm
from .rotary import RotaryEmbedding


class Projections(nn.Module):
    """The base of attention layers: ``q``, ``k``, ``v``, ``o``, ``q_norm``, ``k_norm`` and ``rotary``, as ``config`` specifies.

    ``options``: the options of attention; the layout among them gives the positions of a shard's tokens. ``group``: the ring.
    """

    def __init__(self, config: AttentionConfig, options: Options, group: dist.ProcessGroup | DeviceMesh | None) -> None:
        super().__init__()
        self.config, self.options, self.group = config, options, group
        kept, size, turned = config.param_dtype, config.head_dim, config.rotary
        self.rotary = None if turned is None else RotaryEmbedding(size, turned.base, turned.scaling)
        self.q = LinearMap(config.dim, config.heads * size, config.qkv_bias, kept)
        self.k = LinearMap(config.dim, config.kv_heads * size, config.qkv_bias, kept)
        self.v = LinearMap(config.dim, config.kv_heads * size, config.qkv_bias, kept)
        self.o = LinearMap(config.heads * size, config.dim, config.o_bias, kept)
        self.q_norm = RMSNorm(size, config.eps, kept) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.eps, kept) if config.qk_norm else None

    def projected(
        self, x: Tensor, positions: Tensor | None, context: Tensor | None = None, context_positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [b s heads head_dim] of x [b s dim], and k and v [b t kv_heads head_dim] of context [b t dim].

        Without a context, k and v are those of x. q and k are normalized and rotated by their positions (None: those of the
        layout). Raise ValueError on all ranks if x or context has another shape than the layer takes.
        """
        for name, given in (("x", x), ("context", context)):
            if given is not None and (given.ndim != 3 or given.shape[-1] != self.config.dim):
                with same_error(ring_of(self.group)):
                    raise ValueError(f"{name} must be [batch, tokens, {self.config.dim}], got {list(given.shape)}")
        source = x if context is None else context
        heads = ((self.q, x), (self.k, source), (self.v, source))
        q, k, v = (project(of).unflatten(-1, (-1, self.config.head_dim)) for project, of in heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            positions = self.layout_positions(x.shape[1], x.device) if positions is None else positions
            if context is None:
                k_positions = positions
            else:
                k_positions = self.layout_positions(source.shape[1], x.device) if context_positions is None else context_positions
            q, k = self.rotary(q, positions), self.rotary(k, k_positions)
        return q, k, v

    def layout_positions(self, tokens: int, device: torch.device | None = None) -> Tensor:
        """Return int32 [tokens], the global positions of this rank's shard of ``tokens``, padding included."""
        ring = ring_of(self.group)
        held = positions_of(self.options.layout, ranks_of(ring), tokens * ranks_of(ring), rank_in(ring)).to(device)
        return held[:tokens]  # longer if the layout cannot split ``tokens`` equally, which ring_attention refuses on all ranks

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the group's name in place of the group, which can be neither copied nor pickled."""
        return self.__dict__ | {"group": None if self.group is None else group_name(self.group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(self.group, str):
            self.group = group_of(self.group)


@constant
def ring_of(group: dist.ProcessGroup | DeviceMesh | None) -> Group:
    """Return the process group for a user's ``group``."""
    return group_of(group_name(group))
