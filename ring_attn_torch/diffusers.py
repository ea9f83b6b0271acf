"""diffusers' models over a ring. Importing this module registers the attention backend ``"ring"``.

Example:

    import ring_attn_torch.diffusers
    from diffusers import ContextParallelConfig

    model.set_attention_backend("ring")                       # before enable_parallelism
    model.enable_parallelism(config=ContextParallelConfig(ring_degree=4, ring_anything=True))

diffusers then shards a model's text and image tokens. Attention without a causal mask does not depend on the order of tokens,
so each rank's shard is its text and image tokens, concatenated. Cross-attention to a shard of the text runs over the same ring.
Masks of text travel with the keys. Shards of unequal lengths (``ring_anything``) are padded to the longest, and the padding is
masked. With ``ulysses_degree=n`` above 1 the strategy is ``Ulysses(ranks=n)``.
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
from .ring.agreement import exchange, same_error

NAME = "ring"
"""The name of the attention backend."""

HIDING = -9984.0
"""A key whose bias is at most this counts as masked: -10,000 rounded to bfloat16. Its probability is 0 in float32."""

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

    ``query``, ``key``, ``value``: this rank's shards, [batch, tokens, heads, head_dim]. In cross-attention ``key`` and ``value``
    may have another number of tokens. If every rank holds all keys instead of a shard, out is the same, but lse is larger by the
    log of the number of ranks. ``attn_mask``: the visible keys of this rank, [batch, tokens] or [batch, 1 or heads, 1, tokens],
    equal for all heads. Bools are True for visible keys; floats are 0 for visible keys, and -9984 or less for masked keys. A
    query without visible keys gets 0. ``return_lse``: return (out, lse) with lse [batch, tokens, heads]. Other arguments: as in
    diffusers. Without a parallel config the call is diffusers' native attention on one device.

    With a parallel config raise ValueError if the call is causal or has dropout, or if ``ulysses_degree`` does not divide the
    heads. Raise it too if the mask differs between queries or heads, or holds integers, or floats above -9984 other than 0. All
    ranks raise the error in the first call with these shapes, and in every call if shards may be unequal (``ring_anything``,
    ``ulysses_anything``).
    """
    if _parallel_config is None or _parallel_config.context_parallel_config is None:
        native: Any = dispatch._AttentionBackendRegistry._backends[dispatch.AttentionBackendName.NATIVE]
        return native(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse)
    config = _parallel_config.context_parallel_config
    group = config._flattened_mesh.get_group()
    anything = config.ring_anything or config.ulysses_anything
    own, keys = query.shape[1], key.shape[1]
    with same_error(group):
        try:
            _check(query, is_causal, dropout_p, config.ulysses_degree)
            visible = None if attn_mask is None else _visible_keys(attn_mask, key, query.shape[2])
        except Exception:
            if anything:
                _longest(query, key, group, refused=True)  # which the other ranks wait for
            raise
    if anything:
        longest = _longest(query, key, group)
        query = F.pad(query, (0, 0, 0, 0, 0, longest[0] - own))
        key, value = (F.pad(x, (0, 0, 0, 0, 0, longest[1] - keys)) for x in (key, value))
        visible = torch.ones(key.shape[0], keys, dtype=torch.bool, device=key.device) if visible is None else visible
        visible = F.pad(visible, (0, longest[1] - keys))
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


def _check(query: Tensor, is_causal: bool, dropout_p: float, ulysses: int) -> None:
    if is_causal:
        raise ValueError(
            'the attention backend "ring" got is_causal=True, and a shard of text and image tokens has no order: leave it False, '
            "or call ring_attn_torch.ring_attention, whose layouts have positions"
        )
    if dropout_p:
        raise ValueError(f'the attention backend "ring" takes no dropout, got dropout_p={dropout_p}: pass 0.0')
    if query.shape[2] % ulysses:
        raise ValueError(
            f'the attention backend "ring" got ulysses_degree={ulysses} and {query.shape[2]} heads: pass a ulysses_degree that '
            "divides the heads, and as ring_degree the number of ranks divided by it"
        )


def _longest(query: Tensor, key: Tensor, group: Any, refused: bool = False) -> tuple[int, int]:
    """Return the largest numbers of queries and of keys on any rank. ``refused``: this rank raises an error afterwards; the
    others raise it here, except under torch.compile."""
    lengths = torch.tensor([query.shape[1], key.shape[1], refused], device=query.device)
    dist.all_reduce(lengths, dist.ReduceOp.MAX, group=group)
    queries, keys, anywhere = lengths.tolist()
    if not torch.compiler.is_compiling() and anywhere and not refused:
        exchange('the attention backend "ring" of diffusers', None, group)
    return queries, keys


def _visible_keys(mask: Tensor, key: Tensor, heads: int) -> Tensor:
    batch, tokens = key.shape[:2]
    same = mask.ndim == 4 and mask.shape[1] in (1, heads) and mask.shape[2] == 1
    same = same and (mask.shape[1] == 1 or bool((mask == mask[:, :1]).all()))
    rows = mask[:, 0, 0] if same else mask
    if rows.ndim != 2 or rows.shape[0] not in (1, batch) or rows.shape[1] != tokens:
        raise ValueError(
            f'the attention backend "ring" takes attn_mask [{batch}, {tokens}] or [{batch}, 1, 1, {tokens}], of the keys on this '
            f"rank and the same for all queries and heads, got {list(mask.shape)}: ring_attn_torch.functional takes other masks"
        )
    if rows.dtype != torch.bool:
        hidden = rows <= HIDING if rows.is_floating_point() else None
        if hidden is None or not bool((hidden | (rows == 0)).all()):
            raise ValueError(
                'the attention backend "ring" takes attn_mask of bools, or of 0 and -inf (-10,000 counts as -inf), and no other '
                f"biases, got {rows.dtype}"
            )
        rows = ~hidden
    return rows.expand(batch, -1).contiguous()


def _register() -> None:
    names: Any = dispatch.AttentionBackendName
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = "RING", NAME
        names._member_names_.append("RING")
        names._member_map_["RING"] = names._value2member_map_[NAME] = member
    dispatch._AttentionBackendRegistry.register(names(NAME), supports_context_parallel=True)(ring_backend)


_register()
