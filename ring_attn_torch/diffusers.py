"""diffusers' models over a ring. Importing this module registers the attention backend ``"ring"``.

Example:

    import ring_attn_torch.diffusers
    from diffusers import ContextParallelConfig

    model.set_attention_backend("ring")                       # before enable_parallelism
    model.enable_parallelism(config=ContextParallelConfig(ring_degree=4, ring_anything=True))

diffusers then shards a model's text and image tokens. Attention without a causal mask does not depend on the order of tokens,
so a rank's text and image tokens, concatenated, are its shard. Masks of text travel with the keys. Shards of unequal lengths
(``ring_anything``) are padded to the longest, and the padding is masked. With ``ulysses_degree=n`` above 1 the strategy is
``Ulysses(ranks=n)``.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ring_attn_core.masks import full
from ring_attn_core.problem.strategies import Ulysses
from ring_attn_core.validation import missing_package

if find_spec("diffusers") is None:
    raise missing_package(__name__, "diffusers")

from diffusers.models import attention_dispatch as dispatch  # type: ignore[import-not-found]

from .call.signature import ring_attention

NAME = "ring"
"""The name of the attention backend."""

__all__ = ["NAME", "ring_backend"]


def ring_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return attention of this rank's queries over the keys of all ranks, [batch, tokens, heads, head_dim].

    ``query``, ``key``, ``value``: this rank's shards, [batch, tokens, heads, head_dim]. ``attn_mask``: the visible keys of this
    rank, [batch, tokens] or [batch, 1, 1, tokens]: bool, or floats of 0 and -inf (or the dtype's lowest number). ``return_lse``:
    return (out, lse) with lse [batch, tokens, heads]. Other arguments: as in diffusers. Without a parallel config the call is
    diffusers' native attention on one device.

    With a parallel config raise ValueError if the call is causal or has dropout, or if the numbers of queries and keys differ, as
    in cross-attention. Raise it too if the mask differs between queries or heads, or holds other floats than 0, -inf and the
    dtype's lowest number.
    """
    if _parallel_config is None or _parallel_config.context_parallel_config is None:
        native: Any = dispatch._AttentionBackendRegistry._backends[dispatch.AttentionBackendName.NATIVE]
        return native(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse)
    if is_causal:
        raise ValueError(
            'the attention backend "ring" got is_causal=True, and a shard of text and image tokens has no order: leave it False, '
            "or call ring_attn_torch.ring_attention, whose layouts have positions"
        )
    if dropout_p:
        raise ValueError(f'the attention backend "ring" takes no dropout, got dropout_p={dropout_p}: pass 0.0')
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f'the attention backend "ring" got {query.shape[1]} queries and {key.shape[1]} keys on this rank: cross-attention '
            "reads whole keys on every rank and needs no ring, so its processor must pass parallel_config=None"
        )
    config = _parallel_config.context_parallel_config
    visible = None if attn_mask is None else _visible_keys(attn_mask, key)
    group = config._flattened_mesh.get_group()
    own = query.shape[1]
    if config.ring_anything or config.ulysses_anything:
        longest = torch.tensor([own], device=query.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
        padding = int(longest) - own
        query, key, value = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (query, key, value))
        visible = torch.ones(key.shape[0], own, dtype=torch.bool, device=key.device) if visible is None else visible
        visible = F.pad(visible, (0, padding))
    u = config.ulysses_degree
    result = ring_attention(
        query,
        key,
        value,
        mask=full(),
        key_mask=visible,
        scale=scale,
        layout="contiguous",
        group=group,
        strategy="ring" if u == 1 else "ulysses" if config.ring_degree == 1 else Ulysses(ranks=u),
        return_lse=return_lse,
    )
    return (result[0][:, :own], result[1][:, :own]) if return_lse else result[:, :own]


def _visible_keys(mask: Tensor, key: Tensor) -> Tensor:
    """Return a bool mask [batch, tokens], True for visible keys of this rank.

    Raise ValueError if ``mask`` differs between queries or heads, or holds integers, or biases other than 0, -inf and the dtype's
    lowest number.
    """
    batch, tokens = key.shape[:2]
    rows = mask[:, 0, 0] if mask.ndim == 4 and mask.shape[1:3] == (1, 1) else mask
    if rows.ndim != 2 or rows.shape[0] not in (1, batch) or rows.shape[1] != tokens:
        raise ValueError(
            f'the attention backend "ring" takes attn_mask [{batch}, {tokens}] or [{batch}, 1, 1, {tokens}], of the keys on this '
            f"rank and the same for all queries and heads, got {list(mask.shape)}: ring_attn_torch.functional takes other masks"
        )
    if rows.dtype != torch.bool:
        hidden = rows <= torch.finfo(rows.dtype).min if rows.is_floating_point() else None
        if hidden is None or not bool((hidden | (rows == 0)).all()):
            raise ValueError(
                f'the attention backend "ring" takes attn_mask of bools, or of 0 and -inf, and no other biases, got {rows.dtype}'
            )
        rows = ~hidden
    return rows.expand(batch, -1).contiguous()


def _register() -> None:
    """Add ``"ring"`` to the names of attention backends in diffusers, and register ``ring_backend`` under it."""
    names: Any = dispatch.AttentionBackendName
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = "RING", NAME
        names._member_names_.append("RING")
        names._member_map_["RING"] = names._value2member_map_[NAME] = member
    dispatch._AttentionBackendRegistry.register(names(NAME), supports_context_parallel=True)(ring_backend)


_register()
