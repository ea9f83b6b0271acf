"""Mistakes of the forward: the result that each would give, compared with the measured out and lse."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ring_attn_core.reference.oracle import plain, rounding
from ring_attn_core.reference.tolerance import bound, relative_error

from ..measure import first
from ..oracles import by_name
from .evidence import Evidence, Hypothesis
from .features import forgotten_feature, merged_alike
from .masks import finite_fill, wrong_mask


def not_finite(evidence: Evidence) -> str | None:
    """Report NaN and infinite values, except an lse of -inf, the value of a fully masked query."""
    for name in evidence.missed:
        right = evidence.truth.exact[name]
        got = first(evidence.got[name], right)
        wrong = np.isfinite(right) & ~np.isfinite(got)
        if name == "lse":
            wrong &= ~np.isneginf(got)
        if wrong.any():
            return f"{name} holds {np.count_nonzero(wrong)} values that are NaN or infinite, the first at {_place(wrong)}"
    return None


def sees_nothing(evidence: Evidence) -> str | None:
    """Test whether the lse of queries that see a key is -inf."""
    if "lse" not in evidence.missed:
        return None
    right = evidence.truth.exact["lse"]
    wrong = np.isfinite(right) & np.isneginf(first(evidence.got["lse"], right))
    if not wrong.any():
        return None
    return (
        f"lse is -inf, that of a query that sees no key, for {np.count_nonzero(wrong)} queries that see some, the first at "
        f"{_place(wrong)}"
    )


def _place(wrong: np.ndarray) -> str:
    return f"[{', '.join(map(str, np.argwhere(wrong)[0]))}]"


def own_keys(evidence: Evidence) -> str | None:
    """Test whether each rank attends only to its own keys, so that k and v never travel."""
    if evidence.plan.ranks == 1 or "out" not in evidence.missed:
        return None
    dense, rows = evidence.last_rows
    ranks = evidence.rank_of
    own = dense.seen & (ranks[rows.start : rows.stop, None] == ranks)
    before, after = (evidence.distance(dense.forward(evidence.case.factor, seen).out, rows) for seen in (None, own))
    if not evidence.explained("out", before, after):
        return None
    return "every rank attends to its own keys only: out is that of each shard alone, so k and v do not travel around the ring"


def wrong_scale(evidence: Evidence) -> str | None:
    """Test whether q . k has the wrong scale, from 1/64 to 64 times the right one."""
    if "out" not in evidence.missed:
        return None
    dense, rows = evidence.last_rows
    right = evidence.case.factor
    distance = lambda power: evidence.distance(dense.forward(right * math.exp(power)).out, rows)
    powers = np.linspace(-math.log(64), math.log(64), 33)
    near = int(np.argmin([distance(power) for power in powers]))
    low, high = powers[max(near - 1, 0)], powers[min(near + 1, len(powers) - 1)]
    power = _least(distance, low, high)
    if abs(power) < 1e-5 or not evidence.explained("out", distance(0.0), distance(power)):
        return None
    factor, root = math.exp(power), evidence.case.head_dim**0.5
    known = {
        root: "as if they were not scaled",
        1 / root: "as if they were scaled twice",
        1 / math.log(2): "as if exp2 stood for exp",
        math.log(2): "as if exp stood for exp2",
    }
    hint = next((f", {words}" for value, words in known.items() if abs(factor / value - 1) < 1e-3), "")
    return (
        f"the scale is wrong: scores are multiplied by {right * factor:.6g} where {right:.6g} was said, {factor:.4g} times as "
        f"much{hint}"
    )


def heads(evidence: Evidence) -> str | None:
    """Test whether the heads of out are permuted, or query heads read the wrong key heads."""
    if "out" not in evidence.missed or evidence.case.heads == 1:
        return None
    truth = evidence.truth.exact["out"]
    got = first(evidence.got["out"], truth)
    heads = range(truth.shape[2])
    errors = np.array([[relative_error(got[:, :, h], truth[:, :, other]) for other in heads] for h in heads])
    order = errors.argmin(1)
    before = relative_error(got, truth)
    changed = [h for h in heads if order[h] != h]
    if changed and len({*order}) == len(order) and evidence.explained("out", before, errors.min(1).max()):
        return (
            f"the heads of out are in another order: head {changed[0]} holds what head {order[changed[0]]} should, and in all "
            f"they come as {', '.join(map(str, order))}: look for a transposed reshape of (kv_heads, heads / kv_heads)"
        )
    if evidence.case.kv_heads == 1:
        return None
    dense, rows = evidence.last_rows
    read = [dense.forward(evidence.case.factor, reads=np.full(dense.heads, g)).out for g in range(evidence.case.kv_heads)]
    mine = evidence.got["out"][0, rows.start : rows.stop]
    errors = np.array([[relative_error(mine[:, h], out[:, h]) for out in read] for h in range(dense.heads)])
    reads = errors.argmin(1)
    if (reads != dense.reads).any() and evidence.explained("out", before, errors.min(1).max()):
        expected = ", ".join(map(str, dense.reads))
        return (
            f"query heads read the wrong key heads: 0 to {dense.heads - 1} read key heads {', '.join(map(str, reads))}, expected "
            f"{expected}, h // (heads / kv_heads)"
        )
    return None


NARROW = {"float64": ("float32", "float16", "bfloat16"), "float32": ("float16", "bfloat16"), "float16": ("bfloat16",)}
"""Narrower dtypes of each dtype, the most precise first; tf32 rounds like float16."""


def narrow_dtype(evidence: Evidence) -> str | None:
    """Test whether something is computed in a narrower dtype than the case's."""
    case, names = evidence.case, [name for name in ("out", "dq", "dk", "dv") if name in evidence.missed]
    if not names:
        return None
    given = evidence.of_heads
    right = evidence.exact(given)
    errors = {name: evidence.error_of_heads(name, right[name]) for name in names}
    for dtype in NARROW.get(case.dtype, ()):
        keep = (lambda x: x.astype(np.float32)) if dtype == "float32" else rounding(dtype)
        rounded = {name: keep(x.astype(np.float32)) if name in ("q", "k", "v", "dout") else x for name, x in given.items()}
        rough = by_name(plain(**rounded, mask=case.band, dtype=dtype, **case.scalars))
        usual = {name: relative_error(rough[name], right[name]) for name in names}
        if not all(usual[n] / 10 <= errors[n] <= bound(rough[n], right[n], dtype) for n in names):
            continue
        name = names[0]
        got = evidence.got[name]
        mine = first(got, right[name]).astype(np.float64)
        held = np.array_equal(keep(got.astype(np.float32)), got)
        alike = _cosine(mine - right[name], rough[name] - right[name])
        if alike > 0.3 or held:
            called = "float16 (or tf32)" if dtype == "float16" else dtype
            also = f", and every value of {name} is a {dtype} number" if held else ", and rounds alike"
            return (
                f"{called} where {case.dtype} was said: {name} has an error of {errors[name]:.1e}, plain attention in {dtype} "
                f"has {usual[name]:.1e}{also}"
            )
    return None


def narrow_state(evidence: Evidence) -> str | None:
    """Test whether the softmax of 16-bit inputs is computed in 16 bits instead of float32."""
    dtype = evidence.case.dtype
    if dtype not in ("bfloat16", "float16") or "lse" not in evidence.missed:
        return None
    right, keep = evidence.truth.exact["lse"], rounding(dtype)
    got = first(evidence.got["lse"], right).astype(np.float32)
    usual = relative_error(keep(right.astype(np.float32)), right)
    if not np.array_equal(keep(got), got) or relative_error(got, right) > 8 * usual:
        return None
    if "out" in evidence.missed and evidence.error("out") > 8 * evidence.truth.bounds["out"]:
        return None
    return (
        f"the softmax is computed in {dtype}: every value of lse is a {dtype} number. Scores, exponentials, sums and lse belong "
        "in float32, whatever the inputs are"
    )


def base_two(evidence: Evidence) -> str | None:
    """Test whether lse is in base 2, as inside kernels, or off by a constant."""
    if "lse" not in evidence.missed:
        return None
    right, got = evidence.truth.exact["lse"], first(evidence.got["lse"], evidence.truth.exact["lse"])
    if evidence.explained("lse", evidence.error("lse"), relative_error(got * math.log(2), right)):
        return "lse is in base 2: it is 1 / ln 2 = 1.4427 times the natural logarithm, so multiply it by ln 2"
    finite = np.isfinite(right) & np.isfinite(got)
    offset = float(np.median((got - right)[finite])) if finite.any() else 0.0
    if evidence.explained("lse", evidence.error("lse"), relative_error(got - offset, right)):
        return f"lse is {offset:+.6g} off everywhere, while out is right: the running maximum or a constant is missing in it"
    return None


def _least(distance: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimizer of ``distance`` between ``low`` and ``high``, by golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(50):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if distance(a) < distance(b) else (a, high)
    return (low + high) / 2


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-300))


HYPOTHESES: tuple[Hypothesis, ...] = (
    not_finite,
    own_keys,
    merged_alike,
    finite_fill,
    forgotten_feature,
    wrong_scale,
    heads,
    wrong_mask,
    narrow_dtype,
    narrow_state,
    sees_nothing,
)
"""The hypotheses about the forward, in the order of their tests; the first that holds is reported."""
