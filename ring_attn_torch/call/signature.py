"""The public call ``ring_attention``: its signature and documentation, and the conversion of its arguments to records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.kernels.backends import VENDORS, check_vendor
from ring_attn_core.keywords import named_keywords
from ring_attn_core.masks import causal
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.problem.checks import rate_of
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.strategies import Strategy
from ring_attn_core.records import remember
from ring_attn_core.runs import Band

from ..attend.dropout import Dropout
from ..ring.agreement import refuse
from ..ring.groups import group_name, group_of
from .autograd import attention
from .prepare import Arrays, differentiates, values_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@named_keywords
def ring_attention(
    q: Float[Tensor, "batch seq_local heads head_dim"],
    k: Float[Tensor, "batch kv_local kv_heads head_dim"],
    v: Float[Tensor, "batch kv_local kv_heads v_dim"] | None = None,
    *,
    v_dim: int | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str | BalancedLayout = "zigzag",
    mask: Band = causal(),
    extents: Int[Tensor, "batch seq_local 2"] | None = None,
    key_extents: Int[Tensor, "batch kv_local 2"] | None = None,
    key_mask: Bool[Tensor, "batch kv_local"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    alibi_slopes: Float[Tensor, " heads"] | None = None,
    dropout_rate: float | None = None,
    dropout_seed: int | Int[Tensor, ""] | None = None,
    dropout_offset: tuple[int | Tensor, int | Tensor] = (0, 0),
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
        group: the ring: a ProcessGroup or a 1-D DeviceMesh; None is the default group, or a ring of one without
            torch.distributed.
        layout: "contiguous", "striped" or "zigzag": the assignment of tokens to ranks; see to_layout and from_layout.
            For a shard of ``shard_batch(..., layout="balanced")`` pass its field ``.layout``. Any other layout silently gives
            wrong results for such a shard.
        mask: ``causal()``, ``full()`` or ``sliding_window(before, after)``, in global positions.
        extents: integers ``[batch, seq_local, 2]``, sharded like q: first and end (exclusive) of the global *key* positions that
            each query may see, such as those of ``document_extents`` or ``prefix_extents``. An extent that ends before it begins
            or reaches beyond the keys is refused at every call on a CPU. On a GPU, where reading values waits for the device, it
            is refused at the first call of a problem and clamped later.
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
            ranks and layout, and in JAX. None: no dropout, and a dropout_seed is refused.
        dropout_seed: an int or a 0-d integer tensor, the same on each rank and different at each step.
        dropout_offset: the global indices of the first batch row and of the first head, if rows or heads are sharded too. All
            ranks of a ring hold the same rows and heads, so they must pass the same offset. Ranks compare ints, once for each new
            pair; they do not compare tensors, whose values are on the device.
        length, kv_length: global numbers of queries and keys without padding. Tokens beyond them are padding: no query sees them,
            and their out is 0. None: in a balanced layout, the layout's length. In other layouts ``length`` counts all tokens of
            the q shards; ``kv_length`` is ``length`` if the shards of q and k are equally long, else all tokens of the k shards.
        strategy: the way in which keys travel (docs/strategies.md): "ring", "direct", "two_way", "gather", "ulysses",
            Gather(groups=n), Ulysses(ranks=n), TwoLevel(ranks=n), on GPUs of one host "push". "auto": on GPUs of one host
            "gather", "push" or "direct" if it was measured to be faster; in a balanced layout "direct" if it sends few keys;
            otherwise "ring".
        order: "ring" adds tiles in the order in which keys arrive. "global" adds them by position: results and gradients have the
            same bits on any number of ranks and in any layout (docs/order.md says what that costs, and on which backends).
        backend: "auto": the first usable of "hopper" (Hopper GPUs), "triton" (NVIDIA GPUs) and "blockwise" (any device);
            "triton_tf32" multiplies float32 in tf32. For comparison: "flash" and "cudnn", PyTorch's own FlashAttention-2 and
            cuDNN, and "flash4", the package flash-attn-4. These have their own precision. They refuse windows, extents,
            key_extents, key_mask, softcap, ALiBi, dropout, balanced layouts, a v_dim other than head_dim, and a gradient of lse.
        deterministic: True demands gradients that repeat to the bit. The backends "flash", "cudnn" and "flash4" refuse it; with
            any other backend gradients repeat in any case.
        return_lse: also return lse.

    Return ``out [batch, seq_local, heads, v_dim]`` in q's dtype, and with ``return_lse`` also ``lse [batch, seq_local, heads]``
    in at least float32, natural log, differentiable. A query that sees no key has out 0, gradient 0 and lse -inf; with sinks, lse
    is the sink of the head.

    Raise ValueError, the same on every rank and before any tensor is sent, if inputs do not fit. Also raise it if the ranks make
    different calls and no rank has run its call before. Raise RuntimeError after the group's timeout if a rank does not reach the
    call. Ranks do not compare a call that they have run before, because each comparison costs an exchange. So later differences
    between ranks are not detected: with causal on one rank and full on another results are wrong, after a skipped call all later
    calls are paired wrongly, and with different shard sizes gloo hangs or ends the process. ``check_every_call`` finds these.

    No second derivative, no forward mode, no torch.func.grad. The call is an op of torch.library, so it works under
    torch.compile(fullgraph=True) and selective checkpointing (the op to save is ``torch.ops.ring_attn.forward.default``);
    autocast does not affect it.
    """
    name = group_name(group)
    try:
        if v is None or v_dim is not None:
            v, v_dim = values_of(k, v, v_dim)
        forward_only = backend == "auto" or not differentiates((q, k))
        make = Options if torch.compiler.is_compiling() else _known_options
        options = make(
            layout=layout,
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
            v_dim=v_dim if forward_only else None,  # a backend by name is checked for the backward, which reads v
        )
        if backend in VENDORS:
            check_vendor(options, return_lse and differentiates((q, k, v)))
    except Exception as error:
        refuse(error, group_of(name))
    dropout = None if dropout_seed is None else Dropout(dropout_seed, dropout_offset)
    arrays = Arrays(extents, key_mask, sinks, alibi_slopes, None, key_extents)
    out, lse = attention(q, k, v, arrays, dropout, options, name)
    return (out, lse) if return_lse else out


_known_options = remember(Options)
