"""The cross-entropy loss over all labels of all ranks, each of whose sums ``cross_entropy.py`` computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ring_attn_core.model.chunks import check_dtypes, check_loss, check_weights
from ring_attn_core.problem.strategies import check_order
from ring_attn_core.validation import check_integer, in_words

from ..attend.tiles import accumulation_dtype
from ..axes import axes_of, checks_are_off, on_auto_axes, on_explicit_axes, unknown_axis, without_derivative
from ..sharded import ShardedAxes
from .cross_entropy import ChunkSettings, Labels, order_free_sum, sum_of_hidden, sum_of_logits


def loss(
    logits: jax.Array,
    labels: jax.Array,
    *,
    label_weights: jax.Array | None = None,
    head: jax.Array | None = None,
    chunk: int = 4096,
    reduction: str = "mean",
    order: str = "ring",
    axis_name: str | Sequence[str] | None = "seq",
    mesh: Mesh | None = None,
    batch_axes: str | Sequence[str] = (),
    ignore_index: int = -100,
) -> jax.Array:
    """Return the mean cross-entropy over all labels of all ranks, without labels equal to ``ignore_index``.

        sum_ranks sum_tokens w (log sum_v exp(logits_v) - logits_label) / sum_ranks sum_tokens w

    The mean is in at least float32, equal on all ranks, and 0 without any label. ``logits``: [b s vocab]. ``labels``, int
    [b s]: the next token of each token (``shard_batch`` shifts before it shards). ``axis_name``: all mesh axes over which ranks
    hold different tokens, data-parallel axes included; None for global arrays, outside of shard_map.

    ``label_weights`` [b s]: the weight w of each label, as ``pack_rollouts`` returns it; None: 1. Weights get no gradient, and
    weights of ignored labels have no effect. The mean divides by the sum of the weights over all ranks, however small, and is 0
    if this sum is 0. For a mean, weights must be finite and at least 0. Negative weights need ``reduction="sum"``.

    ``head`` [vocab, dim]: if it is passed, the first argument is the hidden states [b s dim], and the logits ``hidden head^T``
    exist for ``chunk`` tokens of a rank at a time: ``loss(model(ids, ..., return_hidden=True), labels, head=model.head_weight)``.
    Up to rounding, gradients equal those of the full logits. The forward computes the gradients chunk by chunk, and stores them
    until the backward. Hidden's gradient and all products are in hidden's dtype. The head's gradient, logits and softmax are in
    at least float32. For global arrays that are sharded over a mesh, pass ``mesh``, the mesh axis of tokens (``axis_name``) and
    the mesh axes of batch rows (``batch_axes``). Each device then splits its own tokens into chunks, and the head's gradient is
    summed over devices once. Without ``mesh`` a chunk has tokens of all devices, and XLA sums the head's gradient over devices in
    each chunk.

    ``reduction="sum"`` returns the sum without the division. For gradient accumulation, divide this sum by the label count of all
    microbatches (:func:`count_labels`), or by the sum of all weights; a mean of microbatch means is not the mean over all labels.

    ``order="global"``: the loss has the same bits on any number of ranks and in any layout, if the logits have. Gradients have
    not: XLA may round exponentials in shards of another shape otherwise.

    Inside ``jax.shard_map`` (with its default check_vma=True) each rank gets the gradients of replicated weights that one device
    would compute from all tokens. Under check_vma=False, with more than one rank, the loss is right but not differentiable: JAX
    would not sum the gradients over the ranks, and would multiply each gradient by the number of ranks.

    Raise ValueError if the loss is differentiated under check_vma=False with more than one rank, if shapes or dtypes do not fit,
    or if ``ignore_index`` is traced. Outside of shard_map, raise it also if ``axis_name`` is not None and ``mesh`` is None.
    Traced values cannot raise: a label outside the vocabulary, or in a mean a weight that is negative or not finite, makes the
    loss and the gradients of replicated weights NaN on each rank.
    """
    optional = {"head": head, "label_weights": label_weights}
    _check_arrays({"logits": logits, "labels": labels} | {name: x for name, x in optional.items() if x is not None})
    check_integer("ignore_index", ignore_index, static=True)
    check_dtypes(str(logits.dtype), str(labels.dtype))
    check_loss(logits.shape, labels.shape, None if head is None else head.shape, chunk, reduction)
    check_weights(None if label_weights is None else label_weights.shape, labels.shape)
    check_order(order)
    settings, marked = ChunkSettings(int(ignore_index), int(chunk), order == "global"), Labels(labels, label_weights)
    if mesh is not None:
        names = ShardedAxes.of(mesh, axis_name, batch_axes, None).seen_in(marked.labels)
        return _map_loss(settings, reduction, names, logits, marked, head)
    if batch_axes:
        raise ValueError(f"batch_axes={batch_axes!r} goes with mesh=...: inside shard_map name all axes in axis_name")
    return _over_ranks(logits, marked, head, settings, reduction, axis_name)


def count_labels(labels: jax.Array, *, axis_name: str | Sequence[str] | None = "seq", ignore_index: int = -100) -> jax.Array:
    """Return the number of all ranks' labels other than ``ignore_index``, as a scalar.

    :func:`loss` without weights divides by this number. Its dtype is int32, or int64 under ``jax_enable_x64``. ``labels``: int,
    any shape. ``axis_name``: as in :func:`loss`; None on global arrays, with any sharding. For gradient accumulation, let
    ``total`` be the sum of the counts of all microbatches, at least 1. Then backpropagate ``loss(..., reduction="sum") / total``
    of each microbatch. Raise ValueError if labels are not an array or ``axis_name`` is not an axis of the enclosing shard_map.
    """
    _check_arrays({"labels": labels})
    check_integer("ignore_index", ignore_index)
    count = (int32_labels(labels) != ignore_index).sum()
    return count if axis_name is None else _sum("count_labels", axis_name, count)[0]


def _over_ranks(
    logits: jax.Array,
    labels: Labels,
    head: jax.Array | None,
    settings: ChunkSettings,
    reduction: str,
    axis_name: str | Sequence[str] | None,
) -> jax.Array:
    labels = _constants(labels, settings.ignored, accumulation_dtype(logits.dtype), reduction)
    if head is None:
        total, each = sum_of_logits(logits, labels, settings)
    else:
        sum_chunks = on_auto_axes(partial(sum_of_hidden, settings=settings), PartitionSpec())
        rows = logits.reshape(-1, *logits.shape[-2:]) if logits.ndim != 3 else logits
        total, each = sum_chunks(rows, head, jax.tree.map(lambda x: x.reshape(rows.shape[:2]), labels))
    divisor = (labels.labels != settings.ignored).sum() if labels.weights is None else labels.weights.sum()
    summed = [] if each is None else [each] if labels.weights is None else [each, labels.weights]
    sums = [_of_all_ranks(x, axis_name) for x in summed]
    if axis_name is not None:
        total, divisor, *sums = _sum("loss", axis_name, total, divisor, *sums)
    if sums:
        total = _with_value(total, sums[0])
        divisor = divisor if labels.weights is None else sums[1]
    if labels.weights is None:
        total = jnp.where(divisor == 0, 0, total)  # no label, no gradient: not even NaN where the caller divides by 0 labels
    return total if reduction == "sum" else total / jnp.where(divisor == 0, jnp.inf, divisor.astype(total.dtype))


def _of_all_ranks(x: jax.Array, axis_name: str | Sequence[str] | None) -> jax.Array:
    """Return the ``order_free_sum`` of the shards of all ranks on the first of them, 0 on the others."""
    x = lax.stop_gradient(x)
    if axis_name is None:
        return order_free_sum(x)
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    x = lax.pcast(x, missing, to="varying") if (missing := tuple(name for name in names if name not in axes_of(x))) else x
    return jnp.where(lax.axis_index(names) == 0, order_free_sum(lax.all_gather(x, names)), 0)


@jax.custom_vjp
def _with_value(total: jax.Array, value: jax.Array) -> jax.Array:
    """Return ``value`` with the gradient of ``total``."""
    return value


_with_value.defvjp(lambda total, value: (value, None), lambda _, dtotal: (dtotal, None))


def _constants(labels: Labels, ignored: int, dtype: Any, reduction: str) -> Labels:
    """Return int32 labels, and weights without gradient, 0 at ignored labels; in a mean, a negative or infinite one is NaN."""
    numbers, weights = int32_labels(labels.labels), labels.weights
    if weights is not None:
        weights = lax.stop_gradient(jnp.where(numbers != ignored, weights.astype(dtype), 0))
    if weights is not None and reduction == "mean":
        weights = jnp.where((weights >= 0) & jnp.isfinite(weights), weights, jnp.nan)
    return Labels(numbers, weights)


def int32_labels(labels: jax.Array) -> jax.Array:
    """Return labels as int32, because unsigned dtypes cannot hold -100. A label beyond int32 becomes the nearest int32."""
    narrow, own = jnp.iinfo(jnp.int32), jnp.iinfo(labels.dtype)
    if own.max > narrow.max:
        labels = labels.clip(max(own.min, narrow.min), narrow.max)
    return labels.astype(jnp.int32)


def _map_loss(
    settings: ChunkSettings, reduction: str, where: ShardedAxes, logits: jax.Array, labels: Labels, head: jax.Array | None
) -> jax.Array:
    """Return the loss of global arrays. ``where``: the axes of tokens and rows; the head is replicated."""
    sizes, shape = (math.prod(where.mesh.shape[axis] for axis in where.batch_axes), where.ranks), labels.labels.shape
    if len(shape) != 2 or any(tokens % size for tokens, size in zip(shape, sizes, strict=True)):
        raise ValueError(
            f"labels {list(shape)} must be [batch, tokens], which {sizes[0]} members of the mesh can share equally by "
            f"rows and {sizes[1]} by tokens: shard with to_layout or shard_batch, which pad"
        )
    specs = (tokens := PartitionSpec(where.batch_axes or None, where.axis_name)), tokens, PartitionSpec()
    place = lambda x, spec: jax.tree.map(lambda x: on_explicit_axes(x, where.mesh, spec), x)
    return _compile(settings, reduction, where, specs)(*map(place, (logits, labels, head), specs))


@lru_cache(maxsize=256)
def _compile(settings: ChunkSettings, reduction: str, where: ShardedAxes, specs: tuple[PartitionSpec, ...]) -> Any:
    """Return the jitted function of global arrays, cached, because each call outside jit would compile a new function."""
    axes = where.axis_name, *where.batch_axes
    on_shards = lambda logits, labels, head: _over_ranks(logits, labels, head, settings, reduction, axes)
    return jax.jit(jax.shard_map(on_shards, mesh=where.mesh, in_specs=specs, out_specs=PartitionSpec()))


def _check_arrays(arrays: dict[str, Any]) -> None:
    for name, x in arrays.items():
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise ValueError(f"{name} must be an array, got {in_words(x)}")


def _sum(call: str, axis_name: str | Sequence[str], *values: jax.Array) -> tuple[jax.Array, ...]:
    """Return the psum of each value over the axes. A value replicated over an axis counts once for each member of the axis."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        got = axis_name if isinstance(names, tuple | list) else in_words(axis_name)
        raise ValueError(f"axis_name must be the name of a mesh axis, a tuple of names, or None for global arrays, got {got}")
    names = tuple(names)
    try:
        lax.axis_size(names)
    except NameError as error:
        inside = f"call {call} inside jax.shard_map over a mesh with that axis, or pass axis_name=None for whole arrays"
        raise ValueError(unknown_axis(axis_name, inside)) from error
    if lax.axis_size(names) > 1 and any(map(checks_are_off, names)):
        values = tuple(without_derivative(call, x) for x in values)
    missing = ([name for name in names if name not in axes_of(x)] for x in values)
    varying = (lax.pcast(x, tuple(axes), to="varying") if axes else x for x, axes in zip(values, missing, strict=True))
    return tuple(lax.psum(x, names) for x in varying)
