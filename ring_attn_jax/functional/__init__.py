"""Attention under the names and signatures that people know, over a ring.

Each function takes the original's arguments and layout, and the ring behind them: ``axis_name``, ``layout``, ``length``,
``kv_length``. On a ring the arrays are this rank's shards; masks and lengths are whole, in natural order and the same on every
rank. Each argument is honoured exactly, or refused by a ValueError that names it and what to use instead.
"""

from .dot_product import dot_product_attention

__all__ = ["dot_product_attention"]
