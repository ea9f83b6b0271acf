"""The loss over all labels of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..attend.tiles import accumulation_dtype
from ..axes import axes_of, checks_are_off


def loss(
    logits: jax.Array, labels: jax.Array, *, axis_name: str | Sequence[str] | None = "seq", ignore_index: int = -100
) -> jax.Array:
    """Mean cross-entropy over every label of every rank that is not ``ignore_index``, in float32: the same scalar on all ranks.

        sum_ranks sum_tokens (log sum_v exp(logits_v) - logits_label) / sum_ranks number of labels          0 without any label

    logits [b s vocab] and labels int [b s], the next token of each (``shard_batch`` shifts them before it shards). ``axis_name``:
    all mesh axes over which ranks hold different tokens, data parallel ones included; None outside shard_map, on whole arrays.

    Inside ``jax.shard_map`` (with its default check_vma=True) the gradients of replicated weights are one device's on every
    rank. Under check_vma=False the loss is right, but JAX sums no gradient over the ranks, and multiplies each by their number:
    there its derivative is refused. Raises ValueError for that, for shapes that do not fit and outside shard_map; labels outside
    the vocabulary give NaN.
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels must be {list(logits.shape[:-1])} for logits {list(logits.shape)}, got {list(labels.shape)}")
    wide = logits.astype(accumulation_dtype(logits.dtype))
    labels = labels.astype(jnp.int32)  # unsigned ones have no place for ignore_index
    kept = labels != ignore_index
    index = jnp.where(kept, jnp.where(labels < 0, wide.shape[-1], labels), 0)  # a negative index would count from the end
    chosen = jnp.take_along_axis(wide, index[..., None], -1, mode="fill")[..., 0]
    part = jnp.where(kept, jax.nn.logsumexp(wide, -1) - chosen, 0).sum()
    total, count = part, kept.sum()
    if axis_name is not None:
        total, count = _sum(axis_name, total, count)
    return total / jnp.maximum(count, 1).astype(total.dtype)


def _sum(axis_name: str | Sequence[str], *values: jax.Array) -> tuple[jax.Array, ...]:
    """psum; what is the same along an axis counts once for each of its members."""
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    try:
        lax.axis_size(names)
    except NameError as error:
        raise ValueError(
            f"axis_name={axis_name!r} is no mesh axis here: call loss inside jax.shard_map over a mesh with that axis, or pass "
            "axis_name=None for whole arrays"
        ) from error
    if lax.axis_size(names) > 1 and any(map(checks_are_off, names)):
        values = tuple(map(_without_derivative, values))
    missing = ([name for name in names if name not in axes_of(x)] for x in values)
    varying = (lax.pcast(x, tuple(axes), to="varying") if axes else x for x, axes in zip(values, missing, strict=True))
    return tuple(lax.psum(x, names) for x in varying)


@jax.custom_jvp
def _without_derivative(x: jax.Array) -> jax.Array:
    return x


@_without_derivative.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise ValueError(
        "loss has no derivative inside jax.shard_map(check_vma=False): there JAX does not sum the gradients of replicated "
        "weights over the ranks, and each rank would train on its own part, times their number. Leave check_vma at its default"
    )
