"""Exact ring attention for PyTorch: attention over sequences too long for a single device."""

from importlib.util import find_spec

from ring_attn_core import Band, Gather, RingPlan, Run, TwoLevel, Ulysses, causal, full, plan_batches, sliding_window
from ring_attn_core.cache.spec import CacheSizes
from ring_attn_core.data.rollouts import Rollouts
from ring_attn_core.data.trees import TreeExtents
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.rotary import NTK, Llama3, Rotary, YaRN
from ring_attn_core.model.rotary import Linear as Linear  # by name only: import * must not hide the Linear of torch.nn or flax
from ring_attn_core.validation import missing_package

if find_spec("torch") is None:
    raise missing_package(__name__, "torch")

from . import functional as functional  # by name only: import * must not hide torch.nn.functional
from .attend.dropout import dropout_mask
from .block import attend_block, merge
from .call.signature import ring_attention
from .data.batch import Shard as Shard  # by name only: import * must not hide the Shard of torch.distributed.tensor
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
from .layers.attention import RingAttention
from .layers.dilated import DilatedRingAttention
from .layers.dilated_multihead import DilatedAttention
from .layers.gated_delta_net import GatedDeltaNet
from .layers.mamba2 import Mamba2
from .layers.multihead import MultiheadAttention
from .layers.rotary import RotaryEmbedding
from .layers.summary import SummaryAttention
from .layers.tensor_plan import tensor_plan
from .layers.transformer import RingTransformer
from .recurrence.convolution import causal_conv
from .recurrence.delta_rule import gated_delta_rule
from .recurrence.runs import carry, halo, split_runs
from .recurrence.state_space import state_space
from .ring.agreement import check_every_call
from .training.checkpoint import Checkpoints
from .training.gradients import sum_gradients
from .training.llama import load_llama, save_llama
from .training.log_probs import token_log_probs
from .training.loss import count_labels, loss
from .training.ranks import check_ranks
from .training.saved_weights import load_weights, save_weights
from .training.weights import from_numpy, to_numpy
from .variants.dilated import dilated_attention
from .variants.summary import summary_attention

__all__ = [
    "NTK",
    "Band",
    "CacheSizes",
    "Checkpoints",
    "DilatedAttention",
    "DilatedRingAttention",
    "GatedDeltaNet",
    "Gather",
    "KVCache",
    "Llama3",
    "Mamba2",
    "MultiheadAttention",
    "RingAttention",
    "RingPlan",
    "RingTransformer",
    "Rollouts",
    "Rotary",
    "RotaryEmbedding",
    "Run",
    "SequenceShardedDataset",
    "SummaryAttention",
    "TransformerConfig",
    "TreeExtents",
    "TwoLevel",
    "Ulysses",
    "YaRN",
    "attend_block",
    "carry",
    "causal",
    "causal_conv",
    "check_every_call",
    "check_ranks",
    "count_labels",
    "decode_step",
    "dilated_attention",
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
    "sliding_window",
    "split_runs",
    "state_space",
    "sum_gradients",
    "summary_attention",
    "tensor_plan",
    "to_layout",
    "to_numpy",
    "token_log_probs",
    "tree_attention_decode",
    "tree_extents",
    "unpack_rollouts",
]
