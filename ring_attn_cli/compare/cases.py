"""A case, which is one attention problem as plain data, and the random masks and numbers that are drawn from its seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ring_attn_core.layouts import LAYOUTS, find_layout, padded_local
from ring_attn_core.masks import parse, sliding_window
from ring_attn_core.model.alibi import alibi_slopes
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.problem.checks import DTYPES
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem
from ring_attn_core.reference.oracle import rounding
from ring_attn_core.runs import Band

Arrays = dict[str, np.ndarray]

DEVICES = "cpu", "gpu"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem over global sequences; each field is one value of an option of ``ring-attn compare``.

    ``scale``: None means ``head_dim ** -0.5``. ``sinks``: True adds random sinks. ``alibi``: True adds ALiBi slopes.
    ``key_mask``: True masks each key with probability 1/5. ``documents``: number of documents of random lengths that are packed
    into each row; 0 for none. ``segments``, ``dilations`` and ``mixing`` belong to dilated attention; ``block``, ``summaries``
    and ``window`` to summary attention. The variants, which are the implementations that ``ring-attn compare`` runs, check these
    six fields and ``backend`` later. Raise ValueError if a value of any other field is invalid.
    """

    length: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    batch: int = 1
    dtype: str = "float32"
    layout: str = "zigzag"
    mask: str = "causal"
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    dropout_rate: float = 0.0
    key_mask: bool = False
    documents: int = 0
    backend: str = "auto"
    strategy: str = "auto"
    device: str = "cpu"
    seed: int = 0
    segments: tuple[int, ...] = (64, 128)
    dilations: tuple[int, ...] = (1, 2)
    mixing: str = "softmax"
    block: int = 64
    summaries: int = 4
    window: int = 128

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}: choose one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise ValueError(f"unknown device {self.device!r}: choose one of {', '.join(DEVICES)}")
        if self.layout not in LAYOUTS:
            find_layout(self.layout)
        for name in ("length", "heads", "kv_heads", "head_dim", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if self.documents < 0 or self.documents > self.length:
            raise ValueError(f"documents must be from 0 (none) to {self.length}, one a token, got {self.documents}")
        self.problem(1).check()

    @property
    def band(self) -> Band:
        """Return the mask as a ``Band``, an interval of q_pos - k_pos; ``window:128`` means ``sliding_window(128)``."""
        name, _, number = self.mask.partition(":")
        if name == "window" and number.isdigit():
            return sliding_window(int(number))
        if name == "window":
            raise ValueError(f"cannot read the mask {self.mask!r}: write window:BEFORE, the tokens before itself that one sees")
        return parse(self.mask)

    @property
    def factor(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments of ring_attention that are not arrays, without the seed of dropout."""
        names = ("layout", "length", "scale", "softcap", "dropout_rate", "strategy", "backend")
        return {name: getattr(self, name) for name in names} | {"mask": self.band}

    def problem(self, ranks: int) -> Problem:
        """Return one rank's call of ``ring_attention`` on a CPU ring as a ``Problem``, without optional arrays and dropout."""
        local = self.plan(ranks).seq_local
        q, k = ((self.batch, local, heads, self.head_dim) for heads in (self.heads, self.kv_heads))
        options = replace(Options(**self.options), dropout_rate=0.0)  # a problem with dropout needs a seed
        return Problem(q, k, k, (self.dtype, self.dtype, self.dtype), "cpu", ranks, options)

    def plan(self, ranks: int) -> RingPlan:
        """Return the ring plan for this number of ranks, padded as little as the layout allows."""
        return RingPlan(self.layout, self.band, ranks, padded_local(self.layout, ranks, self.length), length=self.length)

    @property
    def features(self) -> list[str]:
        """Return the optional features that this case uses, by the argument names of ring_attention, such as "extents"."""
        values = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks, "alibi_slopes": self.alibi}
        values |= {"dropout_rate": self.dropout_rate, "key_mask": self.key_mask, "extents": self.documents}
        return [name for name, value in values.items() if value]

    @property
    def scalars(self) -> dict[str, Any]:
        """Return scale, softcap and, if used, dropout as keyword arguments that the reference and ring_attention share."""
        drops = {"dropout_rate": self.dropout_rate, "dropout_seed": self.seed} if self.dropout_rate else {}
        return {"scale": self.scale, "softcap": self.softcap} | drops

    @cached_property
    def masks(self) -> Arrays:
        """Return the masks in use: "extents" of documents, int32 [batch, length, 2], and "key_mask", bool [batch, length]."""
        rng = np.random.default_rng((self.seed, 1))
        drawn = {}
        if self.documents:
            cuts = [np.sort(rng.choice(np.arange(1, self.length), self.documents - 1, False)) for _ in range(self.batch)]
            edges = np.array([[0, *cut, self.length] for cut in cuts])
            rows = [
                edges[b][np.searchsorted(edges[b], np.arange(self.length), "right")[:, None] + [-1, 0]] for b in range(self.batch)
            ]
            drawn["extents"] = np.array(rows, np.int32)
        if self.key_mask:
            drawn["key_mask"] = rng.random((self.batch, self.length)) >= 0.2
        return drawn

    @property
    def working(self) -> Any:
        return np.float64 if self.dtype == "float64" else np.float32

    def normal(self, stream: int, *shapes: tuple[int, ...], rounded: bool = True) -> list[np.ndarray]:
        """Draw standard normal arrays from a generator with the seed (``self.seed``, ``stream``), rounded to the case's dtype.
        The arrays are stored in float64 if that is the case's dtype, otherwise in float32."""
        rng = np.random.default_rng((self.seed, stream))
        keep = rounding(self.dtype) if rounded else lambda x: x
        return [keep(rng.standard_normal(shape).astype(self.working)) for shape in shapes]

    @property
    def slopes(self) -> np.ndarray | None:
        return np.array(alibi_slopes(self.heads), self.working) if self.alibi else None
