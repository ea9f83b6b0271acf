"""Random calls of the functions of ``functional``: whole arrays, what each query sees, and attention with any mask in numpy.

``visible`` is drawn here by brute force, from the rules of the originals, and never from a band or an interval of ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ring_attn_core.layouts import LAYOUTS
from ring_attn_core.reference.oracle import rounding
from ring_attn_core.reference.tolerance import UNIT_ROUNDOFF, bound, relative_error

Array = np.ndarray
DRAWS = 8
"""Draws of a call's arrays, to bound its error by."""
DTYPES = ("float32", "float64", "bfloat16", "float16")

FITTING = ("full", "causal", "bottom right", "window", "documents", "prefix", "padding", "tree", "rows and columns", "per row")
UNFITTING = ("holes", "heads")
MASKS = FITTING + UNFITTING


@dataclass
class Call:
    """One call: whole arrays [batch, tokens, heads, dim] in natural order, its arguments, and the words of its refusal, if any.

    ``visible``: bool [1 or batch, queries, keys]. ``slopes``: of ALiBi, whose bias is ``slope (j - i)``. ``refused``: a
    pattern of the error's message.
    """

    name: str
    arrays: dict[str, Array]
    visible: Array
    arguments: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    layout: str = "zigzag"
    scale: float | None = None
    softcap: float | None = None
    slopes: Array | None = None
    refused: str | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """Return batch, queries, keys, heads, kv heads and head dim."""
        (b, s, h, d), (_, t, g, _) = self.arrays["q"].shape, self.arrays["k"].shape
        return b, s, t, h, g, d

    @property
    def lengths(self) -> tuple[int, int]:
        return self.arrays["q"].shape[1], self.arrays["k"].shape[1]

    def attention(self, plain: bool) -> dict[str, Array]:
        """Return out, lse, dq, dk and dv, exact or as one device computes them in the dtype."""
        working = np.float64 if not plain or self.dtype == "float64" else np.float32
        working = np.longdouble if not plain and self.dtype == "float64" else working
        return dense_attention(self, working, rounding(self.dtype) if plain else lambda x: x)

    def check(self, got: Mapping[str, Array]) -> None:
        """Assert that each array of ``got`` is within the computed bound of the exact one."""
        exact, plain = self.attention(plain=False), self.attention(plain=True)
        for name, x in got.items():
            error, most = relative_error(x, exact[name]), bound(plain[name], exact[name], self.dtype)
            if error > most:
                most = self.lucky_bound(name, exact)
            assert error <= most, f"{name} is off by {error:.2e}, the bound is {most:.2e}: {self.dtype} {self.layout} {self.name}"

    def lucky_bound(self, name: str, exact: Mapping[str, Array]) -> float:
        """Return a bound that allows for luck: among hundreds of calls, some plain computations are unusually exact.

        The bound is the largest of DRAWS draws of the arrays, plus two roundings: one of lse, which is carried from step to step,
        in every probability; and one of both terms of ds = p (dout . v - dout . out), which cancel if a query sees one key.
        """
        bounds, rng = [], np.random.default_rng(0)
        for _ in range(DRAWS):
            other = replace(self, arrays=drawn_arrays(rng, self.sizes, self.dtype))
            bounds.append(bound(other.attention(plain=True)[name], other.attention(plain=False)[name], self.dtype))
        lse = exact["lse"][np.isfinite(exact["lse"])]
        roundings = float(np.sqrt(np.mean(lse * lse))) if lse.size else 0.0
        if name in ("dq", "dk"):
            roundings += relative_error(exact[name] + exact[f"terms of {name}"], exact[name])
        return max(bounds) + UNIT_ROUNDOFF[self.dtype] * roundings


def dense_attention(call: Call, working: Any, rounded: Callable[[Array], Array]) -> dict[str, Array]:
    """Return attention and its gradients under any mask. A query that sees no key has out 0, lse -inf and no gradient.

    "terms of dq", "terms of dk": the gradients computed with the absolute values of all terms of ds and of its products.
    """
    by_head = lambda name: np.moveaxis(call.arrays[name].astype(working), 2, 1)
    q, k, v, dout = map(by_head, ("q", "k", "v", "dout"))
    dlse = (
        by_head("dlse")[..., None]
        if {"return_lse", "return_attn_probs"} & {name for name, x in call.arguments.items() if x is True}
        else working(0)
    )
    share = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, share, 1), np.repeat(v, share, 1)
    scale = working(q.shape[-1] ** -0.5 if call.scale is None else call.scale)
    scores, steepness = (q @ k.swapaxes(-1, -2)) * scale, working(1)
    if call.softcap is not None:
        tanh = np.tanh(scores / working(call.softcap))
        scores, steepness = working(call.softcap) * tanh, 1 - tanh * tanh
    if call.slopes is not None:
        lag = np.arange(q.shape[2])[:, None] - np.arange(k.shape[2])
        scores = scores - call.slopes.astype(working)[:, None, None] * lag.astype(working)
    scores = np.where(call.visible[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isneginf(top), 0, top)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    p = p / np.where(total > 0, total, 1)
    out = rounded(rounded(p) @ v)
    delta = (dout * out).sum(-1, keepdims=True) - np.where(total > 0, dlse, 0)
    ds = rounded(p * (dout @ v.swapaxes(-1, -2) - delta) * steepness)
    dk, dv = (ds.swapaxes(-1, -2) @ q) * scale, rounded(p).swapaxes(-1, -2) @ dout
    grouped = lambda x: x.reshape(x.shape[0], -1, share, *x.shape[2:]).sum(2)
    results = {"out": out, "lse": lse, "dq": rounded((ds @ k) * scale), "dk": rounded(grouped(dk)), "dv": rounded(grouped(dv))}
    terms = np.abs(p * steepness) * (np.abs(dout) @ np.abs(v).swapaxes(-1, -2) + np.abs(dout * out).sum(-1, keepdims=True))
    results |= {"terms of dq": terms @ np.abs(k) * np.abs(scale)}
    results |= {"terms of dk": grouped(terms.swapaxes(-1, -2) @ np.abs(q) * np.abs(scale))}
    whole = {name: np.moveaxis(x, 1, 2) for name, x in results.items()}
    return whole | {"lse": whole["lse"][..., 0]}


def drawn_arrays(rng: np.random.Generator, sizes: tuple[int, int, int, int, int, int], dtype: str) -> dict[str, Array]:
    """Return q, k, v, dout and dlse; ``sizes``: batch, queries, keys, heads, kv heads and head dim."""
    b, s, t, h, g, d = sizes
    shapes = {"q": (b, s, h, d), "k": (b, t, g, d), "v": (b, t, g, d), "dout": (b, s, h, d), "dlse": (b, s, h)}
    data = np.float64 if dtype == "float64" else np.float32
    rounds = rounding(dtype)
    return {
        name: (rounds if name != "dlse" else lambda x: x)(rng.standard_normal(shape).astype(data))
        for name, shape in shapes.items()
    }


def drawn_mask(rng: random.Random, kind: str, batch: int, heads: int, queries: int, keys: int) -> Array:
    """Return bool [1 or batch, 1 or heads, queries, keys] of a kind in MASKS."""
    query, key = np.arange(queries)[:, None], np.arange(keys)
    every = np.ones((1, 1, queries, keys), bool)
    cuts = lambda n: np.searchsorted(sorted(rng.randint(0, n) for _ in range(2)), np.arange(n), side="right")
    if kind == "causal":
        return every & (key <= query)
    if kind == "bottom right":
        return every & (key - keys <= query - queries)
    if kind == "window":
        return every & (key >= query - rng.randint(0, 6)) & (key <= query + rng.randint(0, 4))
    if kind == "documents":
        longest = max(queries, keys)
        document = cuts(longest)
        return every & (document[:queries, None] == document[:keys])
    if kind == "per row":
        rows = [
            drawn_mask(rng, rng.choice(("causal", "documents", "prefix", "padding")), 1, 1, queries, keys) for _ in range(batch)
        ]
        return np.concatenate(rows)
    if kind == "prefix":
        return every & ((key <= query) | (key < rng.randint(0, keys)))
    if kind == "padding":
        shown = np.array([rng.random() < 0.7 for _ in range(keys)])
        return every & shown & ((key <= query) | (rng.random() < 0.5))
    if kind == "tree":
        end = np.array([rng.randint(j + 1, max(queries, j + 1)) for j in range(keys)])
        return every & (key <= query) & (query < end)
    if kind == "rows and columns":
        first, last = (np.array([rng.randint(0, n - 1) for _ in range(m)]) for n, m in ((keys, queries), (queries, keys)))
        return every & (key >= first[:, None]) & (query <= last)
    if kind == "heads":
        return every & ((np.arange(heads)[:, None, None] + key) % 2 == 0)
    if kind == "holes":
        return every & ~((query == 1) & (key == 1))
    assert kind == "full"
    return every


def fitting(rng: random.Random, heads: int, queries: int, keys: int) -> str:
    """Return a kind in MASKS that these sizes can have; one in six is refused."""
    if rng.random() < 1 / 6 and min(queries, keys) >= 3:
        return rng.choice(UNFITTING if heads > 1 else ("holes",))
    return rng.choice(FITTING)


def assembled(shards: list[Array], layout: str, length: int) -> Array:
    """Return the whole array [batch, length, ...] of every rank's shard."""
    ranks, local = len(shards), shards[0].shape[1]
    whole = np.zeros((shards[0].shape[0], ranks * local, *shards[0].shape[2:]), shards[0].dtype)
    for rank, shard in enumerate(shards):
        at = [p for run in LAYOUTS[layout if ranks > 1 else "contiguous"](rank, ranks, local) for p in run.positions()]
        whole[:, at] = shard
    padding = whole[:, length:]
    assert ((padding == 0) | np.isneginf(padding)).all(), "padding is neither 0 nor, of lse, -inf"
    return whole[:, :length]
