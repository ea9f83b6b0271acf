"""What the launches of one ring have in common, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from .launch import Array
from .problem import Problem
from .tiles import TileConfig, choose_tiles, padded


@dataclass(frozen=True)
class Call:
    """What the launches of one ring have in common. Shapes are the shards'; ``given``: which optional arrays there are.

    ``packed``: k and v are one array [b t g d+e]; else two. ``aligned``: dropout may draw for four keys at a time.
    ``clean``: there may be keys that no query sees, with NaN in them.
    ``capability``: of the GPU, such as 90. ``tma``: whoever launches can pass TMA descriptors.
    """

    batch: int
    seq_local: int
    kv_local: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    q_runs: int
    k_runs: int
    dtype: str
    scale: float
    softcap: float | None
    dropout_rate: float
    given: frozenset[str]
    packed: bool
    aligned: bool
    clean: bool
    tf32: bool
    capability: int
    tma: bool = True

    def tiles(self, kernel: str) -> TileConfig:
        features = self.given if self.softcap is None else self.given | {"softcap"}
        return choose_tiles(kernel, self.dtype, padded(self.head_dim), padded(self.v_dim), self.capability, features)

    def q_tiles(self, block: int) -> int:
        """How many tiles of queries a shard has."""
        return self.q_runs * -(-(self.seq_local // self.q_runs) // block)

    def k_tiles(self, block: int) -> int:
        return self.k_runs * -(-(self.kv_local // self.k_runs) // block)

    def array(self, name: str, dtype: str = "float32") -> Array | None:
        """An optional array, where it was given."""
        return Array(name, dtype) if name in self.given else None


def call_of(problem: Problem, backend: str, tma: bool, anywhere: bool = False) -> Call:
    """What the launches of a problem have in common. ``anywhere``: its runs may start at any position."""
    plan, (b, s, h, d), (_, t, g, _) = problem.plan, problem.q_shape, problem.k_shape
    names = {array.name for array in problem.arrays}
    return Call(
        batch=b,
        seq_local=s,
        kv_local=t,
        heads=h,
        kv_heads=g,
        head_dim=d,
        v_dim=problem.v_shape[-1],
        q_runs=len(plan.q_runs[0]),
        k_runs=len(plan.k_runs[0]),
        dtype=problem.dtypes[0],
        scale=d**-0.5 if problem.scale is None else problem.scale,
        softcap=problem.softcap,
        dropout_rate=problem.dropout_rate,
        given=frozenset(_GIVEN[name] for name in names),
        packed=bool(plan.hops),
        aligned=plan.keys_in_fours and not anywhere,
        clean=plan.blank_keys or "extents" in names or anywhere,
        tf32=backend == "triton_tf32",
        capability=problem.capability,
        tma=tma,
    )


_GIVEN = {
    "extents": "extents",
    "key_mask": "ceiling",
    "sinks": "sinks",
    "alibi_slopes": "slopes",
    "dropout_seed": "draw",
}
"""What a kernel calls the optional arrays of a call."""
