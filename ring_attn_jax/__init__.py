"""Exact ring attention for JAX: attention over sequences too long for a single device."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ring_attn_core import Band, Gather, RingPlan, Run, TwoLevel, Ulysses, causal, full, plan_batches, sliding_window
from ring_attn_core.cache.spec import CacheSizes
from ring_attn_core.data.rollouts import Rollouts
from ring_attn_core.data.trees import TreeExtents
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.rotary import NTK, Llama3, Rotary, YaRN
from ring_attn_core.model.rotary import Linear as Linear  # by name only: import * must not hide flax's Linear
from ring_attn_core.validation import missing_package

if find_spec("jax") is None:
    raise missing_package(__name__, "jax")

from . import functional as functional  # by name only, as in the PyTorch package
from .attend import launch as launch  # launch.compile_for lowers for a GPU that this host lacks
from .attend.dropout import dropout_mask
from .block import attend_block, merge
from .call.signature import ring_attention
from .call.traced import TracedLayout
from .data.batch import Shard as Shard  # by name only, as in the PyTorch package, where import * would hide its Shard
from .data.batch import shard_batch
from .data.dataset import SequenceShardedDataset
from .data.extents import document_extents, prefix_extents
from .data.gather import gather, gather_token
from .data.layout import from_layout, positions, to_layout
from .data.trees import pack_rollouts, tree_extents, unpack_rollouts
from .inference.cache import KVCache
from .inference.forward import decode_step, prefill_prompts
from .inference.merge import merge_ring
from .inference.prefill import prefill
from .inference.sampling import sample
from .inference.tree_attention import tree_attention_decode
from .layers.adapters import attention_fn
from .layers.dilated_adapter import dilated_attention_fn
from .recurrence.convolution import causal_conv
from .recurrence.delta_rule import gated_delta_rule
from .recurrence.runs import carry, halo, split_runs
from .recurrence.state_space import state_space
from .sharded import sharded_ring_attention
from .training.ranks import check_ranks
from .variants.dilated import dilated_attention
from .variants.sharded_dilated import sharded_dilated_attention
from .variants.summary import sharded_summary_attention, summary_attention

if TYPE_CHECKING:
    from .layers.attention import RingAttention
    from .layers.dilated import DilatedRingAttention
    from .layers.gated_delta_net import GatedDeltaNet
    from .layers.mamba2 import Mamba2
    from .layers.rotary import RotaryEmbedding
    from .layers.summary import SummaryAttention
    from .layers.transformer import RingTransformer
    from .training.checkpoint import Checkpoints
    from .training.llama import load_llama, save_llama
    from .training.log_probs import token_log_probs
    from .training.loss import count_labels, loss
    from .training.saved_weights import load_weights, save_weights
    from .training.weights import from_numpy, to_numpy

__all__ = [
    "NTK",
    "Band",
    "CacheSizes",
    "Checkpoints",
    "DilatedRingAttention",
    "GatedDeltaNet",
    "Gather",
    "KVCache",
    "Llama3",
    "Mamba2",
    "RingAttention",
    "RingPlan",
    "RingTransformer",
    "Rollouts",
    "Rotary",
    "RotaryEmbedding",
    "Run",
    "SequenceShardedDataset",
    "SummaryAttention",
    "TracedLayout",
    "TransformerConfig",
    "TreeExtents",
    "TwoLevel",
    "Ulysses",
    "YaRN",
    "attend_block",
    "attention_fn",
    "carry",
    "causal",
    "causal_conv",
    "check_ranks",
    "count_labels",
    "decode_step",
    "dilated_attention",
    "dilated_attention_fn",
    "document_extents",
    "dropout_mask",
    "from_layout",
    "from_numpy",
    "full",
    "gated_delta_rule",
    "gather",
    "gather_token",
    "halo",
    "load_llama",
    "load_weights",
    "loss",
    "merge",
    "merge_ring",
    "pack_rollouts",
    "plan_batches",
    "positions",
    "prefill",
    "prefill_prompts",
    "prefix_extents",
    "ring_attention",
    "sample",
    "save_llama",
    "save_weights",
    "shard_batch",
    "sharded_dilated_attention",
    "sharded_ring_attention",
    "sharded_summary_attention",
    "sliding_window",
    "split_runs",
    "state_space",
    "summary_attention",
    "to_layout",
    "to_numpy",
    "token_log_probs",
    "tree_attention_decode",
    "tree_extents",
    "unpack_rollouts",
]

_NEEDS_FLAX = {
    "DilatedRingAttention": "layers.dilated",
    "GatedDeltaNet": "layers.gated_delta_net",
    "Mamba2": "layers.mamba2",
    "RingAttention": "layers.attention",
    "RotaryEmbedding": "layers.rotary",
    "SummaryAttention": "layers.summary",
    "RingTransformer": "layers.transformer",
    "count_labels": "training.loss",
    "Checkpoints": "training.checkpoint",
    "load_llama": "training.llama",
    "save_llama": "training.llama",
    "load_weights": "training.saved_weights",
    "save_weights": "training.saved_weights",
    "loss": "training.loss",
    "from_numpy": "training.weights",
    "to_numpy": "training.weights",
    "token_log_probs": "training.log_probs",
}


def __dir__() -> list[str]:
    """Return the names of the module, including those that are imported on first access."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a public name that needs flax on first access: attention itself does not need flax."""
    if name not in _NEEDS_FLAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_NEEDS_FLAX[name]}", __name__), name)
    except ModuleNotFoundError as missing:
        if missing.name != "flax":
            raise
        raise missing_package(name, "flax") from missing
