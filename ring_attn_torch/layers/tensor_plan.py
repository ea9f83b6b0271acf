"""The tensor-parallel plan of a RingTransformer: a torch ParallelStyle for each submodule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ring_attn_core.model.mixers import refuse_mixers

from .transformer import RingTransformer

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def tensor_plan(model: RingTransformer) -> dict[str, ParallelStyle]:
    """Return the plan that splits the attention heads and the MLP features of ``model`` over the ranks of one mesh axis.

    Apply it with ``parallelize_module(model, mesh["tensor"], tensor_plan(model))``.

    Each rank of the axis holds ``heads / ranks`` query heads and ``kv_heads / ranks`` key heads, with the sinks, ALiBi slopes and
    dropout of these heads. It holds a part of the ``hidden`` features of the MLP. If the model's output head is not tied to the
    embedding, it also holds a part of the head's vocabulary. Embedding and norms are replicated. Input ids and output logits are
    plain tensors, equal on all ranks of the axis. All parameters become DTensors of the axis, so that
    ``torch.nn.utils.clip_grad_norm_`` computes one norm over all of them.

    The ranks of the axis hold the same tokens, so pass the group of the other axes as ``group=`` to ``loss`` and
    :func:`sum_gradients`. Apply FSDP2 (``fully_shard``) afterwards, over the other axes. ``parallelize_module`` raises ValueError
    if the number of ranks does not divide ``heads`` and ``kv_heads``.
    """
    refuse_mixers("tensor_plan splits the heads of attention", model.config.mixers, "shard its weights with FSDP2 instead")
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    from .tensor_styles import Heads, Replicated

    plan: dict[str, ParallelStyle] = {"embed": Replicated(), "norm": Replicated()}
    plan |= {f"blocks.*.{name}_norm": Replicated() for name in ("attention", "mlp")}
    plan |= {"blocks.*.attention": Heads()}
    plan |= {f"blocks.*.attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {f"blocks.*.mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"blocks.*.attention.o": RowwiseParallel(), "blocks.*.mlp.down": RowwiseParallel()}
    if model.config.qk_norm:
        plan |= {f"blocks.*.attention.{name}_norm": SequenceParallel(sequence_dim=2, use_local_output=True) for name in "qk"}
    if not model.config.tied:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    return plan
