"""The oracles: for each kind of call, such as attention or a layer, the inputs of a ``Case`` and the exact results.

``ORACLES`` holds one record for each kind: how its inputs are drawn, the truth in at least float64 from
``ring_attn_core.reference``, and which arrays are sharded. Add a record to add a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import numpy as np

from ring_attn_core.reference import dilated, summary
from ring_attn_core.reference.layers import Layers, LayerSettings
from ring_attn_core.reference.oracle import Attention, Features, exact, plain
from ring_attn_core.reference.tolerance import bound, bound_of_sinks

from .cases import Arrays, Case

QKV = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
VOCAB, DEPTH = 61, 2
"""Vocabulary size and number of blocks of the small transformer."""


@dataclass(frozen=True)
class GlobalArrays:
    """Global arrays in the natural order of tokens, by the argument names of a variant's function.
    ``leaves``: names of the differentiated arrays; the gradient of x is named dx. ``cotangents``: by the name of the result, such
    as "out"."""

    arrays: Arrays
    leaves: tuple[str, ...]
    cotangents: Arrays


@dataclass(frozen=True)
class Truth:
    """Exact results, results of a plain computation in the case's dtype, and bounds of the relative error, as dicts by name.
    Exact is float64, or NumPy's long double for attention of float64 inputs."""

    exact: Arrays
    plain: Arrays
    bounds: dict[str, float]
    part: str = ""
    """Description of the leading part of the arrays that the truth covers; "" for all."""


@dataclass(frozen=True)
class Oracle:
    """The inputs and the exact results of one kind of call, such as attention or a layer.
    ``sharded``: names cut along dim 1 in the layout's order; others are replicated, and their gradient is the sum over ranks. A
    result without a cotangent has 0. ``paddings``: the value of an input's padding, else 0."""

    inputs: Callable[[Case], GlobalArrays]
    truth: Callable[[Case, GlobalArrays, Collection[str]], Truth]
    sharded: frozenset[str]
    paddings: dict[str, object] = field(default_factory=lambda: {"key_mask": False})


def make_truth(exact: Arrays, plain: Arrays, dtype: str, **bounds: float) -> Truth:
    """Return the truth of all arrays. ``bounds`` are those that do not follow from the error of the same array."""
    usual = {name: bound(plain[name], x, dtype) for name, x in exact.items() if name not in bounds}
    return Truth(exact, plain, usual | bounds)


def _attention_inputs(case: Case) -> GlobalArrays:
    rows = (case.batch, case.length)
    q, kv = (*rows, case.heads, case.head_dim), (*rows, case.kv_heads, case.head_dim)
    arrays: Arrays = dict(zip(("q", "k", "v"), case.normal(0, q, kv, kv), strict=True))
    (dout,), (dlse,) = case.normal(2, q), case.normal(3, q[:3], rounded=False)
    leaves = ("q", "k", "v")
    if case.sinks:
        (arrays["sinks"],) = case.normal(4, (case.heads,), rounded=False)
        leaves = (*leaves, "sinks")
    if case.slopes is not None:
        arrays["alibi_slopes"] = case.slopes
    return GlobalArrays(arrays | case.masks, leaves, {"out": dout, "lse": dlse})


MAX_PAIRS = 2**27
"""Most (query, key) pairs, over all heads and batch rows, for which the attention oracle computes all results.

With more pairs, only batch row 0 and key head 0 are computed.
"""


def _attention_truth(case: Case, inputs: GlobalArrays, cotangents: Collection[str]) -> Truth:
    arrays = first_heads(case, inputs, cotangents, whole=case.batch * case.heads * case.length**2 <= MAX_PAIRS)
    right = exact(**arrays, mask=case.band, **case.scalars)
    rough = plain(**arrays, mask=case.band, dtype=case.dtype, **case.scalars)
    part = "" if arrays["q"].shape == inputs.arrays["q"].shape else "the first batch row and the query heads of key head 0"
    if part and case.batch > 1:  # the gradient of a sink is a sum over all rows
        right = right._replace(dsinks=None)
    sink_bounds = {} if right.dsinks is None else {"dsinks": bound_of_sinks(rough, right, arrays, case.dtype)}
    return replace(make_truth(by_name(right), by_name(rough), case.dtype, **sink_bounds), part=part)


def first_heads(case: Case, inputs: GlobalArrays, cotangents: Collection[str], whole: bool = False) -> Arrays:
    """Return the inputs and cotangents dout and dlse of attention, under the argument names of the reference's ``exact``.
    Unless ``whole``, keep batch row 0, key head 0 and its query heads. dout or dlse is 0 if its result is not in
    ``cotangents``."""
    dout, dlse = (x if name in cotangents else np.zeros_like(x) for name, x in inputs.cotangents.items())
    arrays = inputs.arrays | {"dout": dout, "dlse": dlse}
    if whole:
        return arrays
    heads = dict.fromkeys(("q", "dout", "dlse", "sinks", "alibi_slopes"), case.heads // case.kv_heads) | {"k": 1, "v": 1}
    by_row = {name: x if name in ("sinks", "alibi_slopes") else x[:1] for name, x in arrays.items()}
    cut = {name: x[: heads[name]] if x.ndim == 1 else x[:, :, : heads[name]] for name, x in by_row.items() if name in heads}
    return by_row | cut


def by_name(attention: Attention | summary.SummaryAttended) -> Arrays:
    return {name: x for name, x in attention._asdict().items() if x is not None}


def _attention_shapes(case: Case) -> dict[str, tuple[int, int]]:
    dim, kv = case.heads * case.head_dim, case.kv_heads * case.head_dim
    return {"q": (dim, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, dim)}


def _layer_inputs(case: Case) -> GlobalArrays:
    dim, shapes = case.heads * case.head_dim, _attention_shapes(case)
    drawn = case.normal(5, *shapes.values(), rounded=False)
    weights = {f"{name}.weight": w * case.working(dim**-0.5) for name, w in zip(shapes, drawn, strict=True)}
    if case.sinks:
        (weights["sinks"],) = case.normal(4, (case.heads,), rounded=False)
    x, dout = case.normal(6, *[(case.batch, case.length, dim)] * 2)
    return GlobalArrays({"x": x} | case.masks | weights, ("x", *weights), {"out": dout})


def _layers(case: Case, dtype: str | None) -> Layers:
    features = Features(alibi_slopes=case.slopes, **(case.scalars | case.masks))  # pyright: ignore[reportArgumentType]
    return Layers(LayerSettings(case.head_dim, case.band), dtype, features)


def _layer_truth(case: Case, inputs: GlobalArrays, cotangents: Collection[str]) -> Truth:
    weights = {name: inputs.arrays[name] for name in inputs.leaves if name != "x"}
    arguments = weights, inputs.arrays["x"], inputs.cotangents["out"]
    exact, plain = (_layers(case, dtype).layer(*arguments) for dtype in (None, case.dtype))
    return make_truth(exact, plain, case.dtype)


def _transformer_inputs(case: Case) -> GlobalArrays:
    dim, hidden = case.heads * case.head_dim, 2 * case.heads * case.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, dim), "norm.weight": (dim,)}
    for at in (f"blocks.{i}." for i in range(DEPTH)):
        shapes |= {f"{at}attention.{name}.weight": shape for name, shape in _attention_shapes(case).items()}
        shapes |= {f"{at}attention.sinks": (case.heads,)} if case.sinks else {}
        shapes |= {f"{at}mlp.{name}.weight": (hidden, dim) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down.weight": (dim, hidden)}
        shapes |= {f"{at}{name}_norm.weight": (dim,) for name in ("attention", "mlp")}
    drawn = dict(zip(shapes, case.normal(5, *shapes.values(), rounded=False), strict=True))
    deviation = {2: case.working(dim**-0.5), 1: case.working(0.2)}
    weights = {name: w * deviation[w.ndim] + case.working("norm" in name) for name, w in drawn.items()}
    ids = np.random.default_rng((case.seed, 6)).integers(0, VOCAB, (case.batch, case.length)).astype(np.int32)
    labels = np.concatenate([ids[:, 1:], np.full((case.batch, 1), -100, np.int32)], 1)
    return GlobalArrays(
        {"ids": ids, "labels": labels} | case.masks | weights, tuple(weights), {"loss": np.array(1, case.working)}
    )


def _transformer_truth(case: Case, inputs: GlobalArrays, cotangents: Collection[str]) -> Truth:
    weights = {name: inputs.arrays[name] for name in inputs.leaves}
    arguments = weights, inputs.arrays["ids"], inputs.arrays["labels"]
    exact, plain = (_layers(case, dtype).transformer(*arguments) for dtype in (None, case.dtype))
    truth = make_truth(exact, plain, case.dtype)
    # The plain loss is one number, which may be accurate by luck. The loss of a token changes by at most twice the largest change
    # of its logits, so the mean over T tokens changes by at most 2 ||change|| / sqrt(T).
    moved = truth.bounds["logits"] * np.linalg.norm(truth.exact["logits"]) / (case.batch * case.length) ** 0.5
    truth.bounds["loss"] += float(2 * moved / abs(truth.exact["loss"]))
    return truth


def _dilated_truth(case: Case, inputs: GlobalArrays, cotangents: Collection[str]) -> Truth:
    call = dilated.DilatedFeatures(
        case.segments, case.dilations, case.mixing, case.band, inputs.arrays.get("key_mask"), case.scale, case.softcap
    )
    arrays = _qkv(inputs)
    return make_truth(by_name(dilated.exact(*arrays, call)), by_name(dilated.plain(*arrays, call, case.dtype)), case.dtype)


def _summary_inputs(case: Case) -> GlobalArrays:
    inputs = _attention_inputs(case)
    (pool,) = case.normal(7, (case.summaries, case.kv_heads, case.head_dim))
    return GlobalArrays(inputs.arrays | {"pool": pool}, (*inputs.leaves, "pool"), inputs.cotangents)


def _summary_truth(case: Case, inputs: GlobalArrays, cotangents: Collection[str]) -> Truth:
    pool, key_mask = inputs.arrays["pool"], inputs.arrays.get("key_mask")
    features = summary.SummaryFeatures(case.block, case.window, case.summaries, pool, key_mask, case.scale, case.softcap)
    run = lambda *arrays: (
        by_name(summary.exact_summary(*arrays, features=features)),
        by_name(summary.plain_summary(*arrays, features=features, dtype=case.dtype)),
    )
    q, k, v, *starts = _qkv(inputs)
    truth = make_truth(*run(q, k, v, *starts), case.dtype)
    for draw in range(3):  # dpool has few entries, which may be accurate by luck: take the worst of four draws
        rng = np.random.default_rng((case.seed, 8, draw))
        right, rough = run(q, k, v, *(rng.permutation(x.ravel()).reshape(x.shape) for x in starts))
        truth.bounds["dpool"] = max(truth.bounds["dpool"], bound(rough["dpool"], right["dpool"], case.dtype))
    return truth


def _qkv(inputs: GlobalArrays) -> QKV:
    arrays, cotangents = inputs.arrays, inputs.cotangents
    return arrays["q"], arrays["k"], arrays["v"], cotangents["out"], cotangents["lse"]


_MASKS = {"extents", "key_mask"}
_ATTENTION = frozenset({"q", "k", "v", "out", "lse", "dq", "dk", "dv"} | _MASKS)
ORACLES: dict[str, Oracle] = {
    "attention": Oracle(_attention_inputs, _attention_truth, _ATTENTION),
    "dilated": Oracle(_attention_inputs, _dilated_truth, _ATTENTION),
    "summary": Oracle(_summary_inputs, _summary_truth, _ATTENTION),
    "layer": Oracle(_layer_inputs, _layer_truth, frozenset({"x", "out", "dx"} | _MASKS)),
    "transformer": Oracle(
        _transformer_inputs,
        _transformer_truth,
        frozenset({"ids", "labels", "logits"} | _MASKS),
        {"key_mask": False, "labels": -100},
    ),
}
