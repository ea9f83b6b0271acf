"""The public call ``ring_attention``: its signature and documentation, and the conversion of its arguments to records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ring_attn_core.keywords import named_keywords
from ring_attn_core.masks import causal
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.problem.checks import check_v_dim, rate_of
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.strategies import Strategy
from ring_attn_core.runs import Band

from ..attend.dropout import dropout_state
from ..axes import dtype_names
from .autograd import attention
from .prepare import Arrays
from .traced import TracedLayout, trace_layout

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@named_keywords
def ring_attention(
    q: Float[Array, "batch seq_local heads head_dim"],
    k: Float[Array, "batch kv_local kv_heads head_dim"],
    v: Float[Array, "batch kv_local kv_heads v_dim"] | None = None,
    *,
    v_dim: int | None = None,
    axis_name: str = "seq",
    layout: str | BalancedLayout | TracedLayout = "zigzag",
    mask: Band = causal(),
    extents: Int[Array, "batch seq_local 2"] | None = None,
    key_extents: Int[Array, "batch kv_local 2"] | None = None,
    key_mask: Bool[Array, "batch kv_local"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    dropout_rate: float | None = None,
    dropout_seed: int | Int[Array, ""] | None = None,
    dropout_offset: tuple[int | Array, int | Array] = (0, 0),
    length: int | None = None,
    kv_length: int | None = None,
    strategy: Strategy = "auto",
    order: str = "ring",
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Compute exact attention of this rank's queries over the keys of all ranks of the ring, with gradients.

        s_ij  = scale q_i . k_j                                     for the keys j that query i may see
        lse_i = log sum_j exp(s_ij)
        out_i = sum_j exp(s_ij - lse_i) v_j

    Query i may see key j if ``mask``, ``extents``, ``key_extents`` and ``key_mask`` all allow it. The softmax is computed
    blockwise with (out, lse) carried from step to step in at least float32 (Liu et al., "Ring Attention with Blockwise
    Transformers", arXiv:2310.01889; the online softmax is algorithm 1 of FlashAttention-2, arXiv:2307.08691).

    Arguments (arrays are this rank's shards, in layout order; positions and lengths count tokens of the global sequence):
        q: ``[batch, seq_local, heads, head_dim]``, bfloat16, float16, float32 or float64.
        k: ``[batch, kv_local, kv_heads, head_dim]``; kv_heads divides heads, and query head h reads key head ``h // (heads /
            kv_heads)``.
        v: ``[batch, kv_local, kv_heads, v_dim]``. None: the values are ``k[..., :v_dim]``, and the forward reads and sends
            k alone (latent attention, docs/features.md); the backward sends these columns twice, in k and as v.
        v_dim: if v is None, the number of columns of the values, at most head_dim. If v is passed, leave v_dim out.
        axis_name: the mesh axis of the ring; call inside ``jax.shard_map`` over it, or use ``sharded_ring_attention``.
        layout: "contiguous", "striped" or "zigzag": the assignment of tokens to ranks; see to_layout and from_layout.
            For a shard of ``shard_batch(..., layout="balanced")`` pass its field ``.layout``, static under jit, or the
            TracedLayout made of that field. Any other layout silently gives wrong results for such a shard.
        mask: ``causal()``, ``full()`` or ``sliding_window(before, after)``, in global positions.
        extents: integers ``[batch, seq_local, 2]``, sharded like q: first and end (exclusive) of the global *key* positions that
            each query may see, such as those of ``document_extents`` or ``prefix_extents``.
        key_extents: integers ``[batch, kv_local, 2]``, sharded like k: first and end (exclusive) of the global *query* positions
            that may see each key, such as those of ``tree_extents`` for a prefix tree.
        key_mask: bool ``[batch, kv_local]``, sharded like k, True if a key may be attended; any pattern.
        scale: the factor of q . k; None is ``head_dim ** -0.5``.
        softcap: scores become ``softcap tanh(s_ij / softcap)`` (Gemma 2, arXiv:2408.00118, section 2).
        sinks: ``[heads]`` logits in the softmax's denominator, ``lse_i = log(exp(sink_h) + sum_j exp(s_ij))``; differentiable.
        alibi_slopes: ``[heads]``, constants; adds ``slope_h (k_pos - q_pos)`` in global positions after softcap (ALiBi,
            arXiv:2108.12409, section 3).
        dropout_rate: the share of probabilities to drop, 0 to below 1, rounded to a multiple of 2^-16; the others are scaled by
            ``1 / (1 - rate)``. The mask depends on (seed, batch row, head, q_pos, k_pos) only, all global: it is the same for any
            ranks and layout, and in PyTorch. None: no dropout, and a dropout_seed is refused.
        dropout_seed: an int or a 0-d integer array, the same on each rank and different at each step.
        dropout_offset: the global indices of the first batch row and of the first head, if rows or heads are sharded too. Pass
            them also if ``jax.vmap`` maps rows or heads: else all of them get the same dropout mask.
        length, kv_length: global numbers of queries and keys without padding. Tokens beyond them are padding: no query sees them,
            and their out is 0. None: in a balanced layout, the layout's length. In other layouts ``length`` counts all tokens of
            the q shards; ``kv_length`` is ``length`` if the shards of q and k are equally long, else all tokens of the k shards.
        strategy: the way in which keys travel (docs/strategies.md): "ring", "direct", "two_way", "gather", "ulysses",
            Gather(groups=n), Ulysses(ranks=n), TwoLevel(ranks=n). "auto": "ring", but on GPUs "direct" under a window, and in a
            balanced layout "direct" if it sends few keys. In a layout balanced for documents, calls with extents take "ring".
        order: "ring" adds tiles in the order in which keys arrive. "global" adds them by position: results and gradients have the
            same bits on any number of ranks and in any layout (docs/order.md says what that costs, and on which backends).
        backend: "auto": the first usable of "hopper" (Hopper GPUs), "triton" (NVIDIA GPUs) and "blockwise" (any device);
            "triton_tf32" multiplies float32 in tf32.
        deterministic: no effect here, since gradients always repeat to the bit.
        return_lse: also return lse.

    Return ``out [batch, seq_local, heads, v_dim]`` in q's dtype, and with ``return_lse`` also ``lse [batch, seq_local, heads]``
    in at least float32, natural log, differentiable. A query that sees no key has out 0, gradient 0 and lse -inf; with sinks, lse
    is the sink of the head.

    Raise ValueError at trace time if inputs do not fit; the message says what to do. Differentiable once, in reverse mode. out
    and lse carry the checkpoint names "ring_attn_out" and "ring_attn_lse": save them under jax.checkpoint and the forward ring
    runs once. JAX does not sum the gradients of replicated arrays, such as the sinks, over the ranks if they are computed inside
    ``jax.shard_map(check_vma=False)``: psum them, or leave check_vma at its default. The gradients of shards need no sum.
    """
    options = Options(
        layout="contiguous" if isinstance(layout, TracedLayout) else layout,
        mask=mask,
        length=length,
        kv_length=kv_length,
        scale=scale,
        softcap=softcap,
        dropout_rate=rate_of(dropout_rate, dropout_seed),
        strategy=strategy,
        order=order,
        backend=backend,
        deterministic=deterministic,
        v_dim=check_v_dim(v_dim, getattr(k, "shape", ()), None if v is None else getattr(v, "shape", ())),
    )
    state = dropout_state(dropout_seed, dropout_offset) if options.dropout_rate and dropout_seed is not None else None
    arrays = Arrays(extents, key_mask, sinks, alibi_slopes, state, key_extents)
    if isinstance(layout, TracedLayout):
        dtype_names(q, k, k if v is None else v)  # raises ValueError if one is not an array
        options, arrays = trace_layout(options, layout, arrays, q.shape, axis_name)
    out, lse = attention(q, k, v, arrays, options, axis_name)
    return (out, lse) if return_lse else out
