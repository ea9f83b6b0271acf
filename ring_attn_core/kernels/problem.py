"""The problem of one call: everything the ring and a backend are judged by, as plain data, and every check of it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..numbers import check_dropout_rate, check_scale, check_softcap
from ..plan import RingPlan
from ..runs import Band, Run

DTYPES = ("bfloat16", "float16", "float32", "float64")
STRATEGIES = ("auto", "ring")
INTEGERS = ("int32", "int64", "uint32", "uint8", "int16", "int8")


class Given(NamedTuple):
    """An optional array of a call: the argument's name, its shape and the name of its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Problem:
    """One call of ``ring_attention`` on one rank, framework-neutral and hashable.

    Shapes are the shards': q ``[batch, seq_local, heads, head_dim]``, k ``[batch, kv_local, kv_heads, head_dim]``,
    v ``[batch, kv_local, kv_heads, v_dim]``. ``dtypes`` are the names of q's, k's and v's, ``device`` the kind that holds them.
    ``arrays``: the optional ones that were given, in the order of the signature. ``capability``: of the NVIDIA GPU, such as 90,
    0 where there is none. ``framework``: "jax" or "torch". ``tma``: it can launch kernels with TMA descriptors.
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
    softcap: float | None
    dropout_rate: float
    arrays: tuple[Given, ...]
    backend: str
    capability: int = 0
    framework: str = "jax"
    tma: bool = True

    @cached_property
    def plan(self) -> RingPlan:
        """The plan of this problem; ValueError where lengths and layout do not fit."""
        lengths: Any = (self.length, self.kv_length)  # None asks for the default
        return RingPlan(self.layout, self.mask, self.ranks, self.q_shape[1], self.k_shape[1], *lengths)

    def check(self) -> RingPlan:
        """The plan, once every check has passed; ValueError says what was expected, what came and what to do."""
        self._check_shapes()
        self._check_dtypes()
        check_scale(self.scale)
        check_softcap(self.softcap)
        check_dropout_rate(self.dropout_rate)
        for array in self.arrays:
            check_array(array, self.q_shape, self.k_shape)
        if self.dropout_rate and "dropout_seed" not in {array.name for array in self.arrays}:
            raise ValueError(
                f"dropout_rate={self.dropout_rate} needs dropout_seed, an integer that is the same on every rank and another at "
                "every step"
            )
        return self.plan

    @property
    def blanks(self) -> bool:
        """Whether some query, padding included, may see nothing."""
        return self.plan.blanks or any(array.name in ("extents", "key_mask") for array in self.arrays)

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


def check_array(array: Given, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
    """ValueError for an optional array of another shape or kind than goes with q and k."""
    axes, shape, dtypes = {
        "extents": ("[batch, tokens of q, 2]", (*q_shape[:2], 2), INTEGERS),
        "key_mask": ("[batch, tokens of k]", tuple(k_shape[:2]), ("bool",)),
        "sinks": ("[heads]", (q_shape[2],), DTYPES),
        "alibi_slopes": ("[heads]", (q_shape[2],), DTYPES),
        "dropout_seed": ("one number", (), INTEGERS),
    }[array.name]
    if array.shape != shape:
        raise ValueError(f"{array.name} must be {axes} = {list(shape)}, got shape {list(array.shape)}. {_HINTS[array.name]}")
    if array.dtype not in dtypes:
        kind = {INTEGERS: "an integer dtype", DTYPES: "a floating dtype"}.get(dtypes, f"dtype {dtypes[0]}")
        raise ValueError(f"{array.name} must have {kind}, got {array.dtype}. {_HINTS[array.name]}")


def check_extents(extents: Any, q_runs: Iterable[tuple[int, int, int, int]], kv_length: int) -> None:
    """ValueError for an extent that is reversed or leaves the keys; those of padded queries may say anything.

    ``extents``: a shard [batch, seq_local, 2] of numpy or torch, in int64; ``q_runs``: its runs (base, length, start, stride).
    Where nobody looks at the values, an extent that leaves the keys is cut, and a reversed one sees nothing.
    """
    for base, length, start, stride in q_runs:
        first, end = extents[:, base : base + length, 0], extents[:, base : base + length, 1]
        wrong = (first < 0) | (end < first) | (end > kv_length)
        if wrong.any():
            b, i = next((b, i) for b, row in enumerate(wrong.tolist()) for i, bad in enumerate(row) if bad)
            got = [int(first[b, i]), int(end[b, i])]
            raise ValueError(
                f"extents must be 0 <= first <= end <= kv_length = {kv_length}, got {got} for the query "
                f"at position {start + stride * i} of batch row {b}: they are global key positions, the end exclusive"
            )


def check_runs(q_run: Run | None, k_run: Run | None, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> tuple[Run, Run]:
    """The runs of a block of queries [b s h d] and of keys [b t g d], from 0 on where None.

    ValueError for what is no run, for unequal strides and, where they are ints, a negative start, an end beyond 2^30 or a length
    that the block does not hold. Start and length may be traced.
    """
    checked = []
    for name, run, shape in (("q_run", q_run, q_shape), ("k_run", k_run, k_shape)):
        tokens = shape[1] if len(shape) == 4 else 0
        run = Run(0, tokens) if run is None else run
        if not isinstance(run, Run):
            raise ValueError(f"{name} must be a Run(start, length, stride) or None, got {run!r}")
        run = Run(_number(name, "start", run.start), _number(name, "length", run.length), run.stride)
        if not isinstance(run.stride, int) or run.stride < 1:
            raise ValueError(f"the stride of {name} must be an int of at least 1, got {run.stride!r}")
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
    """An int where there is one, else a traced integer as it is; ValueError for what is neither."""
    if isinstance(x, int):
        return x
    try:
        return operator.index(x)
    except (TypeError, RuntimeError) as error:  # also what JAX and torch.compile raise for what they trace
        if "int" in str(getattr(x, "dtype", "")):
            return x
        raise ValueError(f"the {field} of {name} must be an int, got {x!r}") from error


FARTHEST = 2**30
"""Positions of blocks are below it, so that their lags fit int32 where JAX traces them."""

_HINTS = {
    "extents": "It holds first and end (exclusive) of the key positions that each query may see, sharded like q",
    "key_mask": "It says which keys may be attended, True or False, sharded like k: of a mask of 0 and 1 pass mask != 0, of an "
    "additive one mask == 0; what differs between queries belongs into mask or extents",
    "sinks": "It holds one logit for every query head",
    "alibi_slopes": "It holds one slope for every query head",
    "dropout_seed": "It is one integer, the same on every rank",
}


def check_strategy(strategy: Any) -> None:
    """ValueError for a strategy that does not exist."""
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}")
