"""Functions with the names and signatures of torch, flash-attn, FLA and mamba_ssm, computed over a ring.

Each attention function takes the arguments and array shapes of the function that it replaces, then the arguments of the ring:
``group``, ``layout``, ``length`` and ``kv_length``, and ``dropout_seed`` if it has dropout. On a ring the arrays are this rank's
shards; masks, lengths and cu_seqlens are global, in natural order and the same on every rank. An unsupported argument raises a
ValueError that says what to use instead. ``alibi`` and ``softcap`` make score_mods for ``flex_attention``.

A mask must be the same for all heads; batch rows may differ. Apart from unused keys (padding), which no query sees, it must be a
band (causal or a sliding window), or restrict each query to an interval of keys, each key to an interval of queries, or both.
Masks of documents, prefixes and prefix trees have this form. Recurrences have documents alone (``recurrences.py``).
"""

from .flash import flash_attn_func, flash_attn_varlen_func
from .flash_packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .flex import alibi, flex_attention, softcap
from .recurrences import (
    causal_conv1d_fn,
    chunk_gated_delta_rule,
    chunk_kda,
    mamba_chunk_scan_combined,
    selective_scan_fn,
)
from .scaled_dot_product import scaled_dot_product_attention

__all__ = [
    "alibi",
    "causal_conv1d_fn",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flex_attention",
    "mamba_chunk_scan_combined",
    "scaled_dot_product_attention",
    "selective_scan_fn",
    "softcap",
]
