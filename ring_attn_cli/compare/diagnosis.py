"""Likely causes of a missed bound: NaN, a wrong scale, a wrong mask, a lower dtype, and a lost or unsummed gradient.

Each function assumes one mistake and returns a sentence if this explains the measured error, else "". The wrong results come from
the float64 reference, for batch row 0 and key head 0. A gradient is only examined if ``out`` has no known mistake.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ring_attn_core.masks import causal, full
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.reference.oracle import exact, plain, rounding
from ring_attn_core.reference.tolerance import bound, relative_error
from ring_attn_core.runs import Band

from .cases import Arrays, Case
from .measure import first
from .oracles import GlobalArrays, Truth, by_name, first_heads

ROWS = 96
"""Number of queries, the first ones, with which a wrong scale is sought."""
LONGEST = 2048
"""Longest sequence, in tokens, for which wrong masks and unsummed gradients are tried; their cost grows with its square."""
NARROW = {"float64": ("float32", "float16", "bfloat16"), "float32": ("float16", "bfloat16"), "float16": ("bfloat16",)}
"""Narrower dtypes of each dtype, the most precise first. float16 also stands for tf32, which has as many fraction bits."""


@dataclass(frozen=True)
class Evidence:
    """The result of one variant (``got``) beside the truth, both as global arrays in the natural order of tokens.
    ``missed``: arrays whose error exceeds its bound. ``alone``: the result on one device; None if it did not run there, or if
    ``got`` is that."""

    case: Case
    plan: RingPlan
    inputs: GlobalArrays
    truth: Truth
    got: Arrays
    missed: Collection[str]
    cotangents: Collection[str]
    alone: Arrays | None = None

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Return the reference's arguments for batch row 0 and key head 0."""
        return first_heads(self.case, self.inputs, self.cotangents) | {"mask": self.case.band} | self.case.scalars

    def attend(self, **changes: Any) -> Arrays:
        """Return the exact results of batch row 0 and key head 0, with ``changes`` of the reference's arguments."""
        return by_name(exact(**self.arguments | changes))

    def explains(self, name: str, wrong: np.ndarray, tokens: Any = np.s_[:]) -> bool:
        """Return True if a mistake that gives ``wrong``, leading rows and heads of an array, explains its error in ``tokens``. At
        most half of the error may remain, and at most 4 times the bound or 1/50 of the error, so that a harmless mistake explains
        nothing."""
        got, right = (first(x[name], wrong).astype(np.float64) for x in (self.got, self.truth.exact))
        if wrong.ndim > 1:
            got, right, wrong = got[:, tokens], right[:, tokens], wrong[:, tokens]
        before, after = relative_error(got, right), relative_error(got, wrong)
        return after <= before / 2 and after <= max(4 * self.truth.bounds[name], before / 50)

    @cached_property
    def ranks(self) -> list[np.ndarray]:
        """Return for each rank which tokens it holds, bool [tokens]."""
        held = [list(self.plan.positions(rank)) for rank in range(self.plan.ranks)]
        return [np.isin(np.arange(self.case.length), positions) for positions in held]


def diagnose(e: Evidence, attention: bool = True) -> list[str]:
    """Return the likely causes as sentences, one sentence if none is known; [] if no bound is missed.
    ``attention``: True if ``ring_attention`` computed the arrays; other variants are tested for fewer causes."""
    if not e.missed:
        return []
    out_causes = (find_scale, find_mask) if "out" in e.missed else ()
    for find in (find_nan, *((*out_causes, find_dtype) if attention else ())):
        if words := find(e):
            return [words]
    found = [find_lost_gradient(e, name, attention) for name in e.missed if name.startswith("d")]
    shorter = f"; masks are tried up to {LONGEST} tokens: pass a shorter --length" if e.case.length > LONGEST else ""
    return [*filter(None, found)] or [f"no known mistake explains the error of {', '.join(e.missed)}{shorter}"]


def find_nan(e: Evidence) -> str:
    """Name the first result with NaN or infinite values where the truth is finite; an lse of -inf may come from a wrong mask."""
    for name in e.missed:
        got = first(e.got[name], right := e.truth.exact[name])
        wrong = np.isfinite(right) & ~np.isfinite(got) & ((name != "lse") | (got != -np.inf))
        if wrong.any():
            return f"{name} holds {wrong.sum()} values that are NaN or infinite, the first at {np.argwhere(wrong)[0].tolist()}"
    return ""


def find_scale(e: Evidence) -> str:
    right, root = e.case.factor, e.case.head_dim**0.5
    rows = {name: e.arguments[name][:, :ROWS] for name in ("q", "dout", "dlse", "extents") if name in e.arguments}
    attend = lambda power: e.attend(**rows, scale=right * math.exp(power))["out"]
    distance = lambda power: relative_error(first(e.got["out"], out := attend(power)), out)
    low, high = -math.log(64), math.log(64)
    for _ in range(9):  # each narrows the interval to its eighth, from 8.3 to less than 1e-7
        powers = np.linspace(low, high, 17)
        near = int(np.argmin([distance(power) for power in powers]))
        low, high = powers[max(near - 1, 0)], powers[min(near + 1, 16)]
    power = (low + high) / 2
    if abs(power) < 1e-5 or not e.explains("out", attend(power)):
        return ""
    factor, known = math.exp(power), {root: "they were not scaled", 1 / root: "they were scaled twice"}
    known |= {1 / math.log(2): "exp2 stood for exp", math.log(2): "exp stood for exp2"}
    hint = next((f", as if {words}" for value, words in known.items() if abs(factor / value - 1) < 1e-3), "")
    said = f"scores are multiplied by {right * factor:.6g} where {right:.6g} was said"
    return f"the scale is wrong: {said}, {factor:.4g} times as much{hint}"


def find_mask(e: Evidence) -> str:
    for words, results in _try_masks(e) if e.case.length <= LONGEST else ():
        sees = np.isfinite(results["lse"][0]).all(-1)  # the out of a fully masked query is arbitrary
        if 2 * sees.sum() >= len(sees) and e.explains("out", results["out"], sees):
            return words
    return ""


def _try_masks(e: Evidence) -> Iterator[tuple[str, Arrays]]:
    case, said = e.case, f", where {e.case.mask} was said"
    if e.plan.ranks > 1:
        yield "every rank attends to its own keys only: k and v do not travel around the ring", _attend_own_keys(e)
        held = np.concatenate([list(e.plan.positions(rank)) for rank in range(e.plan.ranks)])
        held = held[held < case.length]
        if case.layout != "contiguous":
            shards = {name: e.arguments[name][:, held] for name in ("q", "k", "v", "dout", "dlse")}
            results = e.attend(**shards)
            words = f"shards are taken for contiguous ones and are {case.layout}: positions(layout, ranks, length, rank)"
            yield (
                f"the mask is wrong: {words} says where their tokens stand",
                {name: x[:, np.argsort(held)] for name, x in results.items() if name in ("out", "lse")},
            )
    band = case.band
    flip = lambda side: None if side is None else -side
    bands = {"there is none": full(), "out is that of causal": causal()}
    bands |= {"q_pos - k_pos has the other sign": Band(flip(band.hi), flip(band.lo))}
    for step, amount in ((-1, "one key more"), (1, "one key less")):
        if band.lo is not None:
            after = "no query sees itself" if band.lo + step == 1 else f"each query sees {amount} after it"
            bands[after] = Band(band.lo + step, band.hi)
        if band.hi is not None:
            bands[f"each query sees {amount} before it"] = Band(band.lo, band.hi - step)
    yield from ((f"the mask is wrong: {words}{said}", e.attend(mask=other)) for words, other in bands.items() if other != band)
    for name in ("extents", "key_mask"):
        if name in e.arguments:
            yield f"the mask is wrong: {name} is not looked at", e.attend(**{name: None})


def _attend_own_keys(e: Evidence) -> Arrays:
    seen = e.arguments.get("key_mask", np.ones((1, e.case.length), bool))
    results = [(held, e.attend(key_mask=seen & held)) for held in e.ranks]
    return {name: np.sum([_keep(x[name], held) for held, x in results], 0) for name in ("out", "lse")}


def find_dtype(e: Evidence) -> str:
    """Test whether the errors are those of plain attention in a narrower dtype than the case's."""
    names = [name for name in ("out", "dq", "dk", "dv") if name in e.missed]
    for dtype in NARROW.get(e.case.dtype, ()) if names else ():
        keep = (lambda x: x.astype(np.float32)) if dtype == "float32" else rounding(dtype)
        rounded = {name: keep(e.arguments[name].astype(np.float32)) for name in ("q", "k", "v", "dout")}
        arguments: Any = e.arguments | rounded
        rough = by_name(plain(**arguments, dtype=dtype))
        got, right = ({n: first(x[n], rough[n]).astype(np.float64) for n in names} for x in (e.got, e.truth.exact))
        error, usual = ({n: relative_error(x[n], right[n]) for n in names} for x in (got, rough))
        if all(usual[n] / 10 <= error[n] <= bound(rough[n], right[n], dtype) for n in names):
            name = names[0]
            held = np.array_equal(keep(got[name].astype(np.float32)), got[name])
            a, b = got[name] - right[name], rough[name] - right[name]
            if held or (a * b).sum() > 0.3 * np.linalg.norm(a) * np.linalg.norm(b):
                called = "float16 (or tf32)" if dtype == "float16" else dtype
                also = f"and every value of {name} is a {dtype} number" if held else "and rounds alike"
                words = f"{name} has an error of {error[name]:.1e}, plain attention in {dtype} has {usual[name]:.1e}, {also}"
                return f"{called} where {e.case.dtype} was said: {words}"
    return ""


def find_lost_gradient(e: Evidence, name: str, attention: bool) -> str:
    """Test whether a gradient is zero, wrongly scaled, or lacks the parts that other ranks give."""
    right, ranks = e.truth.exact[name].astype(np.float64), e.plan.ranks
    got = first(e.got[name], right).astype(np.float64)
    if not got.any():
        return f"{name} is zero everywhere: the gradient is lost (a detach, a stop_gradient, or a backward that returns none)"
    factor = float((got * right).sum() / (right * right).sum())
    if e.explains(name, factor * right):
        known = [(1 / ranks, "averaged over the ranks where it should be summed"), (ranks, "summed once more over the ranks")]
        beside = None if e.alone is None or name not in e.alone else first(e.alone[name], right)
        same = beside is not None and relative_error(beside, factor * right) < 1e-2
        known = [] if ranks == 1 or same else known
        if attention and name in ("dq", "dk"):
            known += [(1 / e.case.factor, "the scale is missing in it"), (e.case.factor, "scaled twice")]
        hints = ", or ".join(words for value, words in known if abs(factor / value - 1) < 1e-2)
        also = ", on one device too" if same else ""
        return f"{name} is {factor:.4g} times what it should be{also}{hints and ': ' + hints}"
    if attention and name in ("dk", "dv") and ranks > 1 and e.case.length <= LONGEST and e.explains(name, _sum_own_part(e, name)):
        return f"{name} is one rank's part only: what the queries of the other ranks give to it is lost"
    return ""


def _sum_own_part(e: Evidence, name: str) -> np.ndarray:
    """Return the gradient of k or v if each rank adds what its own queries give only."""
    starts = [(held, {n: _keep(e.arguments[n], held) for n in ("dout", "dlse")}) for held in e.ranks]
    return np.sum([_keep(e.attend(**own)[name], held) for held, own in starts], 0)


def _keep(x: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return an array [batch, tokens, ...] with 0 in the tokens that are not ``held``."""
    return np.where(held.reshape(-1, *[1] * (x.ndim - 2)), x, 0)
