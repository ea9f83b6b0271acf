"""JAX's tests of dot_product_attention, read from a checkout: ours is "xla", theirs by default is the reference."""

from __future__ import annotations

from typing import Any

import jax

from .in_jax import attend
from .one import read

theirs = jax.nn.dot_product_attention


def dot_product_attention(*arrays: Any, implementation: str | None = None, **arguments: Any) -> Any:
    if implementation is None:
        return theirs(*arrays, **arguments)
    return attend(*arrays, implementation=implementation, **arguments)


jax.nn.dot_product_attention = dot_product_attention
exec(read("tests/nn_test.py"))
