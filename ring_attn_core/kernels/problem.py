"""The problem of one call: everything the ring and a backend are judged by, as plain data, and every check of it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ..plan import RingPlan
from ..runs import Band

DTYPES = ("bfloat16", "float16", "float32", "float64")
STRATEGIES = ("auto", "ring")
LATER: dict[str, Any] = {
    "extents": None,
    "key_mask": None,
    "softcap": None,
    "sinks": None,
    "alibi_slopes": None,
    "dropout_rate": 0.0,
    "dropout_seed": None,
    "dropout_offset": (0, 0),
}
"""Arguments of the public signature that no path honours yet, and the value that asks for nothing."""


@dataclass(frozen=True)
class Problem:
    """One call of ``ring_attention`` on one rank, framework-neutral and hashable.

    Shapes are the shards': q ``[batch, seq_local, heads, head_dim]``, k ``[batch, kv_local, kv_heads, head_dim]``,
    v ``[batch, kv_local, kv_heads, v_dim]``. ``dtypes`` are the names of q's, k's and v's, ``device`` the kind that holds them.
    """

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    dtypes: tuple[str, str, str]
    device: str
    ranks: int
    layout: str
    mask: Band
    length: int | None
    kv_length: int | None
    scale: float | None
    backend: str

    @cached_property
    def plan(self) -> RingPlan:
        """The plan of this problem; ValueError where lengths and layout do not fit."""
        lengths: Any = (self.length, self.kv_length)  # None asks for the default
        return RingPlan(self.layout, self.mask, self.ranks, self.q_shape[1], self.k_shape[1], *lengths)

    def check(self) -> RingPlan:
        """The plan, once every check has passed; ValueError says what was expected, what came and what to do."""
        self._check_shapes()
        self._check_dtypes()
        number = isinstance(self.scale, int | float) and not isinstance(self.scale, bool) and math.isfinite(self.scale)
        if self.scale is not None and not number:
            raise ValueError(f"scale must be a finite Python number or None (head_dim ** -0.5), got {self.scale!r}")
        return self.plan

    def fingerprint(self) -> dict[str, Any]:
        """What every rank of a ring must have in common, by name, as JSON can carry it."""
        return asdict(self)

    def _check_shapes(self) -> None:
        q, k, v = self.q_shape, self.k_shape, self.v_shape
        for name, shape, axes in (
            ("q", q, "[batch, seq_local, heads, head_dim]"),
            ("k", k, "[batch, kv_local, kv_heads, head_dim]"),
            ("v", v, "[batch, kv_local, kv_heads, v_dim]"),
        ):
            if len(shape) != 4:
                raise ValueError(f"{name} must have 4 dimensions {axes}, got shape {list(shape)}")
        if k[:3] != v[:3]:
            raise ValueError(
                f"k and v must agree in batch, kv_local and kv_heads, got k {list(k)} and v {list(v)}; "
                "only the last dimension may differ"
            )
        if q[0] != k[0]:
            raise ValueError(f"q has batch {q[0]} and k has batch {k[0]}: pass the same batch rows to both")
        if q[3] != k[3]:
            raise ValueError(
                f"q has head_dim {q[3]} and k has {k[3]}: they are multiplied, so they must be equal (v's may differ)"
            )
        for name, size in (("heads", q[2]), ("kv_heads", k[2]), ("head_dim", q[3]), ("v_dim", v[3])):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if q[2] % k[2]:
            raise ValueError(
                f"q has {q[2]} heads and k has {k[2]}: kv heads must divide query heads. "
                "For multi-query attention pass 1 kv head."
            )

    def _check_dtypes(self) -> None:
        if len(set(self.dtypes)) > 1:
            raise ValueError(f"q, k and v must have one dtype, got {', '.join(self.dtypes)}: cast them to the same")
        if self.dtypes[0] not in DTYPES:
            raise ValueError(f"q, k and v must be one of {', '.join(DTYPES)}, got {self.dtypes[0]}: cast them first")


def refuse_later(strategy: Any, **arguments: Any) -> None:
    """NotImplementedError for an argument that asks for what does not exist yet, ValueError for an unknown strategy."""
    for name, value in arguments.items():
        nothing = LATER[name]
        if value is nothing or (isinstance(value, int | float | tuple) and value == nothing):
            continue
        raise NotImplementedError(f"{name} is part of the public signature but does not work yet; leave it at {nothing!r}")
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}")
