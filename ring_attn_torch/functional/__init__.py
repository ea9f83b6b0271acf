"""Attention under the names and signatures that people know, over a ring.

Each function takes the original's arguments and layout, and the ring behind them: ``group``, ``layout``, ``length``,
``kv_length``. On a ring the arrays are this rank's shards; masks, lengths and cu_seqlens are whole, in natural order and the same
on every rank. Each argument is honoured exactly, or refused by a ValueError that names it and what to use instead.
"""

from .flash import flash_attn_func, flash_attn_varlen_func
from .flex import flex_attention
from .scaled_dot_product import scaled_dot_product_attention
from .score_mods import alibi, softcap

__all__ = ["alibi", "flash_attn_func", "flash_attn_varlen_func", "flex_attention", "scaled_dot_product_attention", "softcap"]
