"""``torch.nn.attention.flex_attention.flex_attention`` over a ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.masks import full
from ring_attn_core.validation import in_words

from .block_masks import block_mask_arguments
from .scaled_dot_product import tokens_first
from .score_mods import ScoreMod, arguments_of
from .shards import Arguments, Qkv, RingArguments, attend, shards_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch.nn.attention.flex_attention import BlockMask


def flex_attention(
    query: Float[Tensor, "batch heads seq_local head_dim"],
    key: Float[Tensor, "batch kv_heads kv_local head_dim"],
    value: Float[Tensor, "batch kv_heads kv_local v_dim"],
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str = "zigzag",
    length: int | None = None,
    kv_length: int | None = None,
) -> Any:
    """Compute ``torch.nn.attention.flex_attention.flex_attention`` over a ring, with gradients.

    query, key, value: this rank's shards, ``[batch, heads, tokens, head_dim]``. Return out, or (out, lse [batch, heads, tokens])
    with ``return_lse``, or (out, AuxOutput) with ``return_aux=AuxRequest(lse=True)``.

    ``block_mask``: a BlockMask of the global sequence in natural order, made by ``create_block_mask(mask_mod, B, H, length,
    kv_length)``, the same on every rank. Its mask_mod is evaluated at every pair of tokens, once: the result is cached until the
    BlockMask dies or a tensor or number that the mask_mod reads changes. A mask_mod that reads other objects is evaluated at each
    call. The mask must be the same for all heads (batch rows may differ). Apart from unused keys, which no query sees, it must be
    a band (causal or a window), or restrict each query to an interval of keys, each key to an interval of queries, or both.

    ``score_mod``: ``functional.softcap(cap)``, ``functional.alibi(slopes)``, or a function that torch traces to the same graph.
    ``scale``, ``enable_gqa``: as in torch. ``group``, ``layout`` (a name), ``length``, ``kv_length``: as in ring_attention.

    Raise ValueError, the same on every rank and before anything is sent, if score_mod or the mask is of another kind, if
    ``kernel_options`` are passed, or if ring_attention refuses an argument. Also raise it if a block_mask has more than 32,768
    queries or keys, or lists blocks that contradict its mask_mod, if torch.compile traces a score_mod or a block_mask, or if
    ``return_aux`` asks for max_scores or is passed together with ``return_lse``.
    """
    ring = RingArguments(group, layout, length, kv_length)

    def prepare() -> tuple[Qkv, Arguments]:
        if kernel_options is not None:
            raise ValueError("kernel_options tune torch's own kernels: leave them out, ring attention chooses its tiles itself")
        if return_aux is not None and not isinstance(getattr(return_aux, "lse", None), bool):
            raise ValueError(f"return_aux must be an AuxRequest, got {in_words(return_aux)}: pass AuxRequest(lse=True)")
        if return_aux is not None and return_lse:
            raise ValueError("return_lse beside return_aux is an error in torch too: pass return_aux=AuxRequest(lse=True) alone")
        if getattr(return_aux, "max_scores", False):
            raise ValueError("return_aux asks for max_scores, which ring attention does not return: pass AuxRequest(lse=True)")
        q, k, v = tokens_first(query, key, value, enable_gqa)
        shards = shards_of(q, k, ring)
        mask: Arguments = {"mask": full()}
        if block_mask is not None:
            parts = block_mask_arguments(block_mask, (q.shape[0], q.shape[2], *shards.lengths))
            mask = shards.mask(parts, q.shape[0], q.device)
        score = {"scale": scale, **arguments_of(score_mod, q.device)}
        return (q, k, v), {**shards.arguments, **mask, **score, "return_lse": True}

    out, lse = (x.transpose(1, 2) for x in attend(prepare, ring))
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out
