"""What is likely wrong where a bound is missed: small hypotheses, each a function of the evidence to a sentence, or None.

A hypothesis computes what its mistake would give and says so only where that explains what was measured: an error that is left
over is at most a few times the bound, or a small part of what was there before. Those of the forward come first; where one of
them holds, the gradients follow from it and are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.reference.oracle import exact, plain, rounding
from ring_attn_core.reference.tolerance import bound, relative_error

from .cases import Arrays, Case
from .dense import Dense
from .oracles import Given, Truth, by_name

ROWS = 96
"""Queries that a hypothesis about the forward is tried on: the last ones, which see most."""

LONGEST = 2048
"""Tokens up to which the parts of gradients are looked at; their matrices take the square."""


@dataclass(frozen=True)
class Evidence:
    """What one variant gave, whole arrays in natural order, beside the truth; ``missed``: the names out of bound."""

    case: Case
    plan: RingPlan
    given: Given
    truth: Truth
    got: Arrays
    missed: Collection[str]
    cotangents: Collection[str]

    def explained(self, name: str, before: float, after: float) -> bool:
        """Whether an error of ``after`` is what is left of ``before`` once its cause is known."""
        return after < before and after <= max(4 * self.truth.bounds[name], before / 50)

    def error(self, name: str) -> float:
        return relative_error(self.got[name], self.truth.exact[name])

    @property
    def rank_of(self) -> np.ndarray:
        """int [s]: the rank that holds each token."""
        ranks = np.zeros(self.plan.length, int)
        for rank in range(self.plan.ranks):
            held = np.array(list(self.plan.positions(rank)))
            ranks[held[held < self.plan.length]] = rank
        return ranks


Hypothesis = Callable[[Evidence], str | None]


def diagnose(evidence: Evidence, attention: bool = True) -> list[str]:
    """The sentences, one at least where something is missed; ``attention``: the arrays are those of attention itself."""
    if not evidence.missed:
        return []
    said = [_not_finite(evidence)]
    if not any(said) and attention:
        said = next(([words] for each in FORWARD if (words := each(evidence))), [])
        said = said or [each(evidence) for each in OF_LSE]
    said = [words for words in said if words]
    if not said or said[0].startswith("lse"):
        said += [words for name in _gradients(evidence, bool(said)) if (words := _lost_gradient(evidence, name, attention))]
    names = ", ".join(sorted(evidence.missed))
    return said or [f"no known mistake explains the error of {names}"]


def _gradients(evidence: Evidence, of_lse: bool) -> list[str]:
    """The missed gradients that a wrong lse does not explain."""
    names = [name for name in evidence.truth.exact if name in evidence.missed and name.startswith("d")]
    if of_lse:
        right = _with_lse_times(evidence, 1 / math.log(2))
        names = [
            n for n in names if n not in right or not evidence.explained(n, evidence.error(n), _of_slice(evidence, n, right[n]))
        ]
    return names


def _not_finite(evidence: Evidence) -> str | None:
    for name in evidence.missed:
        wrong = ~np.isfinite(evidence.got[name]) & np.isfinite(_cut(evidence.truth.exact[name], evidence.got[name]))
        if wrong.any():
            first = ", ".join(map(str, np.argwhere(wrong)[0]))
            return f"{name} holds {np.count_nonzero(wrong)} values that are NaN or infinite, the first at [{first}]"
    return None


def _own_keys(evidence: Evidence) -> str | None:
    """Each rank attends to the keys that it holds, and k and v never travel."""
    if evidence.plan.ranks == 1 or "out" not in evidence.missed:
        return None
    dense, rows = _last_rows(evidence)
    ranks = evidence.rank_of
    own = ranks[rows.start : rows.stop, None] == ranks
    before, after = (_distance(evidence, dense.forward(evidence.case.factor, seen).out, rows) for seen in (None, own))
    if not evidence.explained("out", before, after):
        return None
    return "every rank attends to its own keys only: out is that of each shard alone, so k and v do not travel around the ring"


def _wrong_scale(evidence: Evidence) -> str | None:
    """q . k is multiplied by another number."""
    if "out" not in evidence.missed:
        return None
    dense, rows = _last_rows(evidence)
    right = evidence.case.factor
    distance = lambda power: _distance(evidence, dense.forward(right * math.exp(power)).out, rows)
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
        f"the scale is wrong: scores are multiplied by {right * factor:.6g} where {right:.6g} was said, {factor:.4g} times as much"
        f"{hint}"
    )


def _heads(evidence: Evidence) -> str | None:
    """The heads of out stand in another order, or query heads read other key heads."""
    if "out" not in evidence.missed or evidence.case.heads == 1:
        return None
    truth = evidence.truth.exact["out"]
    got = _cut(evidence.got["out"], truth)
    heads = range(truth.shape[2])
    errors = np.array([[relative_error(got[:, :, h], truth[:, :, other]) for other in heads] for h in heads])
    order = errors.argmin(1)
    before = evidence.error("out") if got.shape == evidence.got["out"].shape else relative_error(got, truth)
    changed = [h for h in heads if order[h] != h]
    if changed and len({*order}) == len(order) and evidence.explained("out", before, errors.min(1).max()):
        return (
            f"the heads of out are in another order: head {changed[0]} holds what head {order[changed[0]]} should, and in all "
            f"they come as {', '.join(map(str, order))}: look for a transposed reshape of (kv_heads, heads / kv_heads)"
        )
    if evidence.case.kv_heads == 1:
        return None
    dense, rows = _last_rows(evidence)
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
"""Dtypes that keep fewer bits, the finest first; tf32 rounds as float16 does."""


def _narrow_dtype(evidence: Evidence) -> str | None:
    """Something is computed in a dtype of fewer bits than was said."""
    case, names = evidence.case, [name for name in ("out", "dq", "dk", "dv") if name in evidence.missed]
    if not names:
        return None
    cut = _slice(evidence)
    for dtype in NARROW.get(case.dtype, ()):
        keep = (lambda x: x.astype(np.float32)) if dtype == "float32" else rounding(dtype)
        arrays = {n: keep(x.astype(np.float32)) if n in "qkv" or n == "dout" else x for n, x in cut.items()}
        rough, right = by_name(plain(**arrays, mask=case.band, dtype=dtype, **case.scalars)), by_name(_exact(evidence, cut))
        errors = {name: _of_slice(evidence, name, right[name]) for name in names}
        usual = {name: relative_error(rough[name], right[name]) for name in names}
        if not all(usual[n] / 10 <= errors[n] <= bound(rough[n], right[n], dtype) for n in names):
            continue
        name = names[0]
        mine = _cut(evidence.got[name], right[name]).astype(np.float64)
        alike = _cosine(mine - right[name], rough[name] - right[name])
        holds = bool(np.array_equal(keep(evidence.got[name].astype(np.float32)), evidence.got[name]))
        if alike > 0.3 or holds:
            words = f"; every value of {name} is a {dtype} number" if holds else ""
            called = "float16 (or tf32)" if dtype == "float16" else dtype
            return (
                f"{called} where {case.dtype} was said: {name} has an error of {errors[name]:.1e}, and plain attention in {dtype} "
                f"has {usual[name]:.1e}, of the same signs{words}"
                if alike > 0.3
                else f"{called} where {case.dtype} was said: the error of {name} is {errors[name]:.1e}, that of {dtype}{words}"
            )
    return None


def _base_two(evidence: Evidence) -> str | None:
    """lse in base 2, as kernels carry it."""
    if "lse" not in evidence.missed:
        return None
    right, got = evidence.truth.exact["lse"], _cut(evidence.got["lse"], evidence.truth.exact["lse"])
    if evidence.explained("lse", evidence.error("lse"), relative_error(got * math.log(2), right)):
        return "lse is in base 2: it is 1 / ln 2 = 1.4427 times the natural logarithm, so multiply it by ln 2"
    finite = np.isfinite(right) & np.isfinite(got)
    offset = float(np.median((got - right)[finite])) if finite.any() else 0.0
    if evidence.explained("lse", evidence.error("lse"), relative_error(got - offset, right)):
        return f"lse is {offset:+.6g} off everywhere, while out is right: the running maximum or a constant is missing in it"
    return None


def _lse_without_gradient(evidence: Evidence) -> str | None:
    """The gradients are those of out alone."""
    names = [name for name in ("dq", "dk") if name in evidence.missed]
    if not names or "lse" not in evidence.cotangents:
        return None
    right = _with_lse_times(evidence, 0.0)
    if all(evidence.explained(n, evidence.error(n), _of_slice(evidence, n, right[n])) for n in names):
        return f"lse has lost its gradient: {' and '.join(names)} are those of out alone"
    return None


def _lost_gradient(evidence: Evidence, name: str, attention: bool) -> str | None:
    """A gradient is zero, a multiple of the right one, or lacks what some ranks give."""
    right = evidence.truth.exact[name].astype(np.float64)
    got = _cut(evidence.got[name], right).astype(np.float64)
    if not got.any():
        return f"{name} is zero everywhere: the gradient is lost (a detach, a stop_gradient, or a backward that returns none)"
    factor = float((got * right).sum() / (right * right).sum())
    if evidence.explained(name, evidence.error(name), relative_error(got - factor * right + right, right)):
        ranks = evidence.plan.ranks
        known = {1 / ranks: "averaged over the ranks where it should be summed", float(ranks): "summed once more over the ranks"}
        hint = next((f": {words}" for value, words in known.items() if ranks > 1 and abs(factor / value - 1) < 1e-2), "")
        return f"{name} is {factor:.4g} times what it should be{hint}"
    known_parts = attention and name in ("dq", "dk", "dv") and evidence.plan.ranks > 1
    return _lost_part(evidence, name) if known_parts and evidence.plan.length <= LONGEST else None


def _lost_part(evidence: Evidence, name: str) -> str | None:
    """Fit every rank's tokens by what each rank gives to their gradient: a part that counts 0 times is lost."""
    case, ranks = evidence.case, evidence.rank_of
    dense = Dense(case, evidence.given.arrays, range(case.length), case.heads // case.kv_heads)
    dlse = evidence.given.cotangents["lse"][0] * ("lse" in evidence.cotangents)
    parts = dense.parts(evidence.given.cotangents["out"][0], dlse, ranks, evidence.plan.ranks)[name]
    got = evidence.got[name][0, :, : dense.heads] if name == "dq" else evidence.got[name][0, :, 0]
    counts = np.full((evidence.plan.ranks, evidence.plan.ranks), np.nan)
    fitted = np.zeros_like(got, np.float64)
    for rank in range(evidence.plan.ranks):
        at = ranks == rank
        columns = parts[:, at].reshape(evidence.plan.ranks, -1)
        alive = [giver for giver in range(evidence.plan.ranks) if columns[giver].any()]
        solved = np.linalg.lstsq(columns[alive].T, got[at].ravel(), rcond=None)[0]
        counts[rank, alive] = solved
        fitted[at] = (solved @ columns[alive]).reshape(fitted[at].shape)
    right = parts.sum(0)
    if not evidence.explained(name, relative_error(got, right), relative_error(got - fitted + right, right)):
        return None
    givers = "keys" if name == "dq" else "queries"
    off = [(rank, giver) for rank, giver in np.argwhere(np.abs(counts - 1) > 0.02)]
    lost = all(abs(counts[pair]) < 0.02 for pair in off)
    others = [tuple(pair) for pair in np.argwhere(np.isfinite(counts)) if pair[0] != pair[1]]
    if lost and {(int(a), int(b)) for a, b in off} == {(int(a), int(b)) for a, b in others}:
        return f"{name} is one rank's part only: every rank has what its own {givers} give, and those of the other ranks are lost"
    words = [f"rank {giver}'s {givers} count {counts[rank, giver]:.3g} times for rank {rank}'s tokens" for rank, giver in off]
    return f"{name} is put together wrongly: {'; '.join(words[:4])}{' and so on' if len(words) > 4 else ''}" if words else None


FORWARD: tuple[Hypothesis, ...] = (_own_keys, _wrong_scale, _heads, _narrow_dtype)
OF_LSE: tuple[Hypothesis, ...] = (_base_two, _lse_without_gradient)


def _last_rows(evidence: Evidence) -> tuple[Dense, range]:
    length = evidence.case.length
    rows = range(max(length - ROWS, 0), length)
    return Dense(evidence.case, evidence.given.arrays, rows, evidence.case.heads), rows


def _distance(evidence: Evidence, out: np.ndarray, rows: range) -> float:
    """The relative error of what was measured, were ``out`` the truth of these rows."""
    return relative_error(evidence.got["out"][0, rows.start : rows.stop], out)


def _least(distance: Callable[[float], float], low: float, high: float) -> float:
    """Golden section: where ``distance`` is least between two numbers."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(50):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if distance(a) < distance(b) else (a, high)
    return (low + high) / 2


def _slice(evidence: Evidence) -> Arrays:
    """Inputs and cotangents of batch row 0 and key head 0, as the oracle takes them."""
    group = evidence.case.heads // evidence.case.kv_heads
    given, cotangents = evidence.given.arrays, evidence.given.cotangents
    cut = {"q": given["q"][:1, :, :group], "k": given["k"][:1, :, :1], "v": given["v"][:1, :, :1]}
    cut |= {name: given[name][:1] for name in ("extents", "key_mask") if name in given}
    cut |= {name: given[name][:group] for name in ("sinks", "alibi_slopes") if name in given}
    dlse = cotangents["lse"][:1, :, :group] * ("lse" in evidence.cotangents)
    return cut | {"dout": cotangents["out"][:1, :, :group], "dlse": dlse}


def _exact(evidence: Evidence, arrays: Arrays):
    return exact(**arrays, mask=evidence.case.band, **evidence.case.scalars)


def _with_lse_times(evidence: Evidence, factor: float) -> Arrays:
    """Exact gradients of row 0 and key head 0 where the cotangent of lse counts ``factor`` times."""
    cut = _slice(evidence)
    return by_name(_exact(evidence, cut | {"dlse": cut["dlse"] * factor}))


def _of_slice(evidence: Evidence, name: str, right: np.ndarray) -> float:
    """The relative error of what was measured of row 0 and key head 0."""
    return relative_error(_cut(evidence.got[name], right), right)


def _cut(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The first entries of ``x`` along every dimension, as many as ``like`` has."""
    return x[tuple(slice(n) for n in like.shape)]


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-300))
