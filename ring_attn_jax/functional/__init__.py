"""Attention functions with the names and signatures of ``jax.nn``, computed over a ring.

Each function takes the arguments and array shapes of the function that it replaces, then the arguments of the ring:
``axis_name``, ``layout``, ``length`` and ``kv_length``. On a ring the arrays are this rank's shards; masks and lengths are
global, in natural order and the same on every rank. No argument is ignored: an unsupported value raises a ValueError that says
what to use instead.
"""

from .dot_product import dot_product_attention

__all__ = ["dot_product_attention"]
