"""Checks of arguments of ``ring_attention``, ``attend_block``, ``merge`` and others, made before any computation or transfer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from ..runs import Run
from ..validation import STATIC, as_number, in_words, is_finite, is_integer, is_traced, number_in_words

MIN_CAP, MAX_CAP = 1e-18, 1e30
"""Bounds of softcap. Beyond them score / softcap may overflow or become subnormal in float32."""

MAX_SCALE = 1e18
"""Largest magnitude of scale. With a greater scale, score / softcap may overflow in float32."""


def check_scale(scale: Any) -> None:
    if scale is not None and not (is_finite(scale) and abs(scale) <= MAX_SCALE):
        raise ValueError(
            f"scale must be a finite Python number of at most {MAX_SCALE:g}, or None (head_dim ** -0.5), got "
            + number_in_words(scale)
        )


def check_softcap(softcap: Any) -> None:
    if softcap is not None and not (is_finite(softcap) and MIN_CAP <= softcap <= MAX_CAP):
        raise ValueError(
            f"softcap must be a Python number above 0 ({MIN_CAP:g} to {MAX_CAP:g}), got {in_words(softcap)}: scores become "
            "softcap * tanh(score / softcap); pass None to leave them" + (STATIC if is_traced(softcap) else "")
        )


def check_v_dim(v_dim: Any, k_shape: Sequence[int], v_shape: Sequence[int] | None) -> int | None:
    """Return ``v_dim`` as an int if v is not passed, since the values are then k's first ``v_dim`` columns; else None."""
    v_dim, traced = as_number(v_dim), STATIC if is_traced(v_dim) else ""
    if v_shape is not None:
        if v_dim is not None and not (_is_int(v_dim) and v_shape and v_dim == v_shape[-1]):
            raise ValueError(
                f"v_dim is for v=None, where the values are k's first columns, got v_dim={in_words(v_dim)} and v of shape "
                f"{list(v_shape)}: leave out v_dim, or v{traced}"
            )
        return None
    if v_dim is None:
        raise ValueError("v is None: pass v, or v_dim=, the number of k's first columns that are the values")
    if k_shape and not (_is_int(v_dim) and 1 <= v_dim <= k_shape[-1]):
        raise ValueError(
            f"v_dim must be an int of 1 to {k_shape[-1]}, k's head_dim: the number of k's first columns that are the values; got "
            f"{in_words(v_dim)}{traced}"
        )
    return v_dim


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def check_mask_sizes(batch: Any, heads: Any, *dims: int) -> None:
    """Check the sizes of a dropout mask; ``dims``: the numbers of dimensions of q_positions and of k_positions."""
    for name, x in (("batch", batch), ("heads", heads)):
        if not is_integer(x) or x < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {in_words(x)}")
    if dims != (1, 1):
        raise ValueError(f"q_positions and k_positions must be 1-D, a position for each token, got {dims[0]} and {dims[1]} dims")


def check_dropout_rate(rate: Any) -> None:
    if not (is_finite(rate) and 0 <= rate < 1):
        raise ValueError(
            "dropout_rate is the share of probabilities that are dropped, a Python number from 0 to below 1, got "
            + number_in_words(rate)
        )


def rate_of(rate: float | None, seed: Any) -> float:
    """Return the dropout rate, 0.0 if it is None. Raise ValueError if ``seed`` is passed without a rate."""
    if rate is None and seed is not None:
        raise ValueError(
            "dropout_seed was given without dropout_rate, and nothing would be dropped: pass dropout_rate=, 0.0 to drop nothing "
            "on purpose, or leave dropout_seed out"
        )
    return 0.0 if rate is None else rate


ITEM = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
DTYPES = tuple(ITEM)
INTEGERS = ("int32", "int64", "uint32", "uint8", "int16", "int8")


class OptionalArray(NamedTuple):
    """An optional array of a call: name of the argument, shape, and dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def check_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], q_tokens: str, k_tokens: str) -> None:
    """Raise ValueError if the shapes of q, k and v do not fit together. ``q_tokens``, ``k_tokens``: the words for dimension 1."""
    k_axes = f"[batch, {k_tokens}, kv_heads,"
    for name, shape, axes in (
        ("q", q, f"[batch, {q_tokens}, heads, head_dim]"),
        ("k", k, f"{k_axes} head_dim]"),
        ("v", v, f"{k_axes} v_dim]"),
    ):
        if len(shape) != 4:
            raise ValueError(f"{name} must have 4 dimensions {axes}, got shape {list(shape)}")
    if k[:3] != v[:3]:
        raise ValueError(
            f"k and v must agree in batch, {k_tokens} and kv_heads, got k {list(k)} and v {list(v)}; only the last dimension may "
            "differ"
        )
    if q[0] != k[0]:
        raise ValueError(f"q has batch {q[0]} and k has batch {k[0]}: pass the same batch rows to both")
    if q[3] != k[3]:
        raise ValueError(f"q has head_dim {q[3]} and k has {k[3]}: they are multiplied, so they must be equal (v's may differ)")
    for name, size in (("heads", q[2]), ("kv_heads", k[2]), ("head_dim", q[3]), ("v_dim", v[3])):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if q[2] % k[2]:
        raise ValueError(
            f"q has {q[2]} heads and k has {k[2]}: kv heads must divide query heads. For multi-query attention pass 1 kv head."
        )


def check_array(array: OptionalArray, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
    expected = {
        "extents": ("[batch, tokens of q, 2]", (*q_shape[:2], 2), INTEGERS),
        "key_extents": ("[batch, tokens of k, 2]", (*k_shape[:2], 2), INTEGERS),
        "key_mask": ("[batch, tokens of k]", tuple(k_shape[:2]), ("bool",)),
        "sinks": ("[heads]", (q_shape[2],), DTYPES),
        "alibi_slopes": ("[heads]", (q_shape[2],), DTYPES),
        "dropout_seed": ("one number", (), INTEGERS),
    }
    check_expected(array, *expected[array.name])


def check_expected(array: OptionalArray, axes: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    """Raise ValueError if an optional array has another shape or another dtype. ``axes``: the shape in words."""
    if array.shape != shape:
        raise ValueError(f"{array.name} must be {axes} = {list(shape)}, got shape {list(array.shape)}. {_HINTS[array.name]}")
    if array.dtype not in dtypes:
        kind = {INTEGERS: "an integer dtype", DTYPES: "a floating dtype"}.get(dtypes, f"dtype {dtypes[0]}")
        raise ValueError(f"{array.name} must have {kind}, got {array.dtype}. {_HINTS[array.name]}")


def check_extents(extents: Any, q_runs: Iterable[tuple[int, int, int, int]], kv_length: int) -> None:
    """Check one rank's extents, int64 [batch, seq_local, 2], except those of padding, because kernels only clip them."""
    _check_intervals("extents", extents, q_runs, ("query", "key", "kv_length"), kv_length)


def check_key_extents(key_extents: Any, k_runs: Iterable[tuple[int, int, int, int]], length: int) -> None:
    """Check one rank's key extents, int64 [batch, kv_local, 2]: the query positions (end exclusive) that may see a key."""
    _check_intervals("key_extents", key_extents, k_runs, ("key", "query", "length"), length)


def _check_intervals(
    name: str, extents: Any, runs: Iterable[tuple[int, int, int, int]], words: tuple[str, str, str], most: int
) -> None:
    """Check that intervals (first, end) lie within 0 .. ``most``; ``words`` name their owner, their contents and ``most``."""
    owner, others, limit = words
    for base, length, start, stride in runs:
        first, end = extents[:, base : base + length, 0], extents[:, base : base + length, 1]
        wrong = (first < 0) | (end < first) | (end > most)
        if wrong.any():
            b, i = next((b, i) for b, row in enumerate(wrong.tolist()) for i, bad in enumerate(row) if bad)
            got = [int(first[b, i]), int(end[b, i])]
            raise ValueError(
                f"{name} must be 0 <= first <= end <= {limit} = {most}, got {got} for the {owner} "
                f"at position {start + stride * i} of batch row {b}: they are global {others} positions, the end exclusive"
            )


def check_runs(q_run: Run | None, k_run: Run | None, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> tuple[Run, Run]:
    """Return checked runs of a query and a key block [batch, tokens, heads, head_dim]; None is the whole block from 0 on."""
    checked = []
    for name, run, shape in (("q_run", q_run, q_shape), ("k_run", k_run, k_shape)):
        tokens = shape[1] if len(shape) == 4 else 0
        run = Run(0, tokens) if run is None else run
        if not isinstance(run, Run):
            raise ValueError(f"{name} must be a Run(start, length, stride) or None, got {run!r}")
        run = Run(_number(name, "start", run.start), _number(name, "length", run.length), as_number(run.stride))
        if not isinstance(run.stride, int) or run.stride < 1:
            raise ValueError(f"the stride of {name} must be an int of at least 1, got {number_in_words(run.stride)}")
        if isinstance(run.start, int) and not 0 <= run.start < FARTHEST:
            raise ValueError(f"{name} starts at position {run.start}: positions count from 0, and must be below 2^30")
        if isinstance(run.length, int) and not 0 <= run.length <= tokens:
            raise ValueError(f"{name} has {run.length} tokens, and the block holds {tokens}: pad the block, or shorten the run")
        start, length = (x if isinstance(x, int) else 0 for x in (run.start, run.length))
        if length and start + run.stride * (length - 1) >= FARTHEST:
            raise ValueError(f"{name} ends at position {start + run.stride * (length - 1)}: positions must be below 2^30")
        checked.append(run)
    if checked[0].stride != checked[1].stride:
        raise ValueError(
            f"q_run has stride {checked[0].stride} and k_run {checked[1].stride}: a block needs equal strides, so cut the longer "
            "steps' positions out of the other, or attend to each residue class by itself"
        )
    return checked[0], checked[1]


def _number(name: str, field: str, x: Any) -> Any:
    """Convert an integer to an int; return a traced integer unchanged. Raise ValueError if ``x`` is not a single integer."""
    if not is_integer(x):
        raise ValueError(f"the {field} of {name} must be an int, got {x!r}")
    try:
        return x if isinstance(x, int) else operator.index(x)
    except (TypeError, RuntimeError):  # JAX and torch.compile raise these for traced integers
        return x


def check_along(x: Any, is_array: bool, expected: str, dim: Any) -> None:
    """Check that ``x`` is an array of the package, whose type ``expected`` names, and has the dimension ``dim``."""
    if not is_array:
        raise ValueError(f"x must be {expected}, got {in_words(x)}: convert it first")
    if not is_integer(dim) or not -len(x.shape) <= dim < len(x.shape):
        raise ValueError(f"dim={in_words(dim)} is not a dimension of x {list(x.shape)}: pass the one that counts tokens")


def check_number(name: str, x: Any) -> None:
    if not isinstance(x, int | float | complex) and getattr(x, "shape", None) != ():
        raise ValueError(f"{name} must be one number, got {in_words(x)}")


def check_pairs(a: Any, b: Any, is_array: Callable[[Any], bool], expected: str) -> list[tuple[Any, Any]]:
    """Return the checked pairs (out, lse) passed to ``merge``: ``a`` and ``b``, or the list ``a`` if ``b`` is None."""
    pairs, taken = [a, b] if b is not None else a, "merge takes two pairs (out, lse), or a list of them"
    if not isinstance(pairs, tuple | list) or not pairs or any(is_array(pair) for pair in pairs):
        raise ValueError(f"{taken}, got {in_words(pairs) if not pairs or not isinstance(pairs, tuple | list) else 'one pair'}")
    for pair in pairs:
        _check_pair(taken, pair, is_array, expected)
    shapes = [tuple(shape) for out, lse in pairs for shape in (out.shape, (*lse.shape, 1))]
    sizes = [set(dims) - {1} for dims in zip_longest(*map(reversed, shapes), fillvalue=1)]
    if any(len(size) > 1 for size in sizes[1:]) or len({shape[-1:] for shape in shapes[::2]} - {(1,)}) > 1:
        got = ", ".join(f"out {list(out.shape)} and lse {list(lse.shape)}" for out, lse in pairs)
        raise ValueError(
            "merge takes pairs of out [batch, tokens, heads, v_dim] and lse [batch, tokens, heads] of the same queries, got "
            + got
        )
    return [(out, lse) for out, lse in pairs]


def _check_pair(taken: str, pair: Any, is_array: Callable[[Any], bool], expected: str) -> None:
    """Raise ValueError if ``pair`` is not a pair (out, lse) of arrays. ``taken``: first words of the error message."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"{taken}, as attend_block returns them, got {in_words(pair)} for a pair")
    for name, x in zip(("out", "lse"), pair, strict=True):
        if not is_array(x):
            raise ValueError(f"{name} must be {expected}, got {in_words(x)}: {taken}")


def check_own_pair(pair: Any, is_array: Callable[[Any], bool], expected: str) -> None:
    """Check that ``pair`` is (out [..., v_dim], lse [...]), both of floating dtypes of at least two bytes."""
    _check_pair("merge_ring takes a pair (out, lse)", pair, is_array, expected)
    out, lse = pair
    if not out.shape or tuple(out.shape[:-1]) != tuple(lse.shape):
        raise ValueError(
            "merge_ring takes a pair of out [batch, tokens, heads, v_dim] and lse [batch, tokens, heads], got out "
            f"{list(out.shape)} and lse {list(lse.shape)}"
        )
    for name, x in (("out", out), ("lse", lse)):
        if "float" not in str(x.dtype) or "float8" in str(x.dtype):
            raise ValueError(f"{name} must have a floating dtype of at least two bytes, got {x.dtype}")


FARTHEST = 2**30
"""Upper bound (exclusive) of the positions of ``attend_block`` and of a decode window, so that every lag fits int32."""

_HINTS = {
    "extents": "It holds first and end (exclusive) of the key positions that each query may see, sharded like q",
    "key_extents": "It holds first and end (exclusive) of the query positions that may see each key, sharded like k",
    "key_mask": "It says which keys may be attended, True or False, sharded like k: of a mask of 0 and 1 pass mask != 0, of an "
    "additive one mask == 0; what differs between queries belongs into mask or extents",
    "sinks": "It holds one logit for every query head",
    "alibi_slopes": "It holds one slope for every query head",
    "dropout_seed": "It is one integer, the same on every rank",
    "q_positions": "It holds the position of every query, the same on every rank",
    "k_positions": "It holds the position of the token in every slot of this rank's part of the cache, -1 for an empty slot",
    "tree_mask": "It says which of the newest tokens, the queries of this call, each of them sees, itself included",
    "k_scale": "It holds what the keys of every kv head are multiplied by",
    "v_scale": "It holds what the values of every kv head are multiplied by",
}
