"""Exact ring attention for PyTorch: attention over sequences that no single device can hold."""

from ring_attn_core import Band, RingPlan, Run, causal, full, sliding_window

from .api import ring_attention
from .block import attend_block, merge
from .extents import document_extents, prefix_extents
from .layers import RingAttention, RotaryEmbedding
from .sharding import Shard, from_layout, positions, shard_batch, to_layout
from .state import from_numpy, to_numpy
from .transformer import RingTransformer, loss, sum_gradients

__all__ = [
    "Band",
    "RingAttention",
    "RingPlan",
    "RingTransformer",
    "RotaryEmbedding",
    "Run",
    "Shard",
    "attend_block",
    "causal",
    "document_extents",
    "from_layout",
    "from_numpy",
    "full",
    "loss",
    "merge",
    "positions",
    "prefix_extents",
    "ring_attention",
    "shard_batch",
    "sliding_window",
    "sum_gradients",
    "to_layout",
    "to_numpy",
]
