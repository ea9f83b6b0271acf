"""Exact ring attention for JAX: attention over sequences that no single device can hold."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ring_attn_core import Band, RingPlan, Run, causal, full, sliding_window

from .api import ring_attention
from .block import attend_block, merge
from .extents import document_extents, prefix_extents
from .sharded import sharded_ring_attention
from .sharding import Shard, from_layout, positions, shard_batch, to_layout

if TYPE_CHECKING:
    from .layers import RingAttention, RotaryEmbedding
    from .state import from_numpy, to_numpy
    from .transformer import RingTransformer, loss

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
    "sharded_ring_attention",
    "sliding_window",
    "to_layout",
    "to_numpy",
]

_NEEDS_FLAX = {
    "RingAttention": "layers",
    "RotaryEmbedding": "layers",
    "RingTransformer": "transformer",
    "loss": "transformer",
    "from_numpy": "state",
    "to_numpy": "state",
}


def __getattr__(name: str) -> Any:
    """The layers, imported when they are asked for: attention itself does not need flax."""
    if name not in _NEEDS_FLAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_NEEDS_FLAX[name]}", __name__), name)
    except ModuleNotFoundError as missing:
        if missing.name != "flax":
            raise
        raise ModuleNotFoundError(f"{name} needs flax: pip install 'ring-attn[flax]'", name="flax") from missing
