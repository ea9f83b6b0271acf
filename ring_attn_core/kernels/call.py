"""The parameters that all launches of one call of ring attention share, as a record of plain data.

``RingCall.tiles`` returns the tiles of a portable kernel, which ``tile_sizes.py`` chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ..dropout import rescale, threshold
from ..plan.global_order import GlobalPlan
from ..plan.ulysses import HeadSplit
from ..problem.problem import Problem
from ..records import hash_once
from .launch import Argument, Array, Scalar
from .tile_sizes import TileConfig, choose_tiles, latent_tiles, pad_width, tail_of

BEYOND = 2**30
"""A position that stands for the end of any sequence. Extents are clipped to it, so that the kernels' arithmetic fits int32."""


@hash_once
@dataclass(frozen=True)
class RingCall:
    """The parameters that all launches of one call of ring attention share.

    ``seq_local``, ``kv_local``: queries and keys in the shards of one step, which may be joined from several ranks. ``q_runs``,
    ``k_runs``: equally long runs in a shard; a balanced layout's shard is one run of local indices. ``packed``: k and v are one
    array [batch, tokens, kv_heads, head_dim + v_dim] with float32 gradients, as whenever keys travel. With ``values_in_keys`` the
    array is k, and the values are its first ``v_dim`` columns. ``aligned``: all runs have stride 1 and start at multiples of 16,
    so one call of Philox serves several probabilities. ``zero_masked``: keys that no query sees may hold NaN. ``fully_masked``:
    some queries may see no key and hold NaN. ``hopper``: Hopper's kernels run if they take the call, except in the passes
    ``portable``. ``tiles_override``: tiles to compare. ``ordered``: sums follow the positions, so no design depends on the rank;
    ``own``: the runs and tokens of the queries and of the keys whose results this rank computes, if ``ordered``; None: all.
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
    array_names: frozenset[str]
    packed: bool
    aligned: bool
    zero_masked: bool
    fully_masked: bool
    tf32: bool
    capability: int
    tma: bool = True
    hopper: bool = False
    portable: frozenset[str] = frozenset()
    tiles_override: TileConfig | None = None
    values_in_keys: bool = False
    ordered: bool = False
    own: tuple[tuple[int, int] | None, tuple[int, int] | None] = (None, None)

    @cached_property
    def of_own_queries(self) -> RingCall:
        """Return a copy of this record for the launches of results of queries."""
        return self if self.own[0] is None else replace(self, q_runs=self.own[0][0], seq_local=self.own[0][1], own=(None, None))

    @cached_property
    def of_own_keys(self) -> RingCall:
        return self if self.own[1] is None else replace(self, k_runs=self.own[1][0], kv_local=self.own[1][1], own=(None, None))

    @property
    def key_columns(self) -> tuple[int, int, int]:
        """Return (columns per head of the array that holds k, the same for v, first column of v in the array that holds v)."""
        if self.values_in_keys:
            return self.head_dim, self.head_dim, 0
        together = self.head_dim + self.v_dim
        return (together, together, self.head_dim) if self.packed else (self.head_dim, self.v_dim, 0)

    @property
    def tail(self) -> int | None:
        """Return the width of k's second tile, 0 if the first holds all columns, or None if k's tiles hold no values."""
        return tail_of(self.head_dim, self.v_dim) if self.values_in_keys else None

    @property
    def carries_rest(self) -> bool:
        """Return True for float32 inputs: then steps pass on ``rest``, the rounding error of lse, besides out and lse."""
        return self.dtype == "float32"

    @property
    def features(self) -> frozenset[str]:
        """Return the names of the optional arrays that the call has, and "softcap" if it has one."""
        return self.array_names if self.softcap is None else self.array_names | {"softcap"}

    @property
    def by_extents(self) -> bool:
        """Return whether extents or key extents (the interval of queries that may see a key) limit the tiles that are visited."""
        return not self.array_names.isdisjoint({"extents", "key_extents"})

    def tiles(self, kernel: str) -> TileConfig:
        """Return the tiles of the kernel of this name."""
        if self.tiles_override is not None:
            return self.tiles_override
        if self.tail is not None and kernel == "forward":
            return latent_tiles(self.dtype, pad_width(self.v_dim), self.tail, self.capability, self.features)
        return choose_tiles(kernel, self.dtype, pad_width(self.head_dim), pad_width(self.v_dim), self.capability, self.features)

    @property
    def numbers(self) -> dict[str, Argument | None]:
        """Return the scalar arguments of the kernels that compute scores. The product of q . k and ``inner`` is the score times
        log2(e) or, with softcap, the argument of tanh."""
        cap, log2e = self.softcap, math.log2(math.e)
        return {
            "inner": Scalar(self.scale * log2e if cap is None else self.scale / cap, "fp32"),
            "softcap": None if cap is None else Scalar(cap * log2e, "fp32"),
            "threshold": Scalar(threshold(self.dropout_rate) << 16, "u32") if "dropout_seed" in self.array_names else None,
            "rescale": Scalar(rescale(self.dropout_rate), "fp32"),
            "S": Scalar(self.seq_local, "i32"),
            "T": Scalar(self.kv_local, "i32"),
        }

    @property
    def head_counts(self) -> dict[str, Argument]:
        """Return the numbers of query heads and of key heads as arguments of Hopper's kernels."""
        return {"H": Scalar(self.heads, "i32"), "G": Scalar(self.kv_heads, "i32")}

    @lru_cache(maxsize=4096)  # noqa: B019  # records are few, and equal ones share an entry
    def of_keys(self, tokens: int) -> RingCall:
        """Return a copy of this record for a shard of ``tokens`` keys."""
        return replace(self, kv_local=tokens)

    def of_length(self, tokens: int) -> RingCall:
        """Return a copy of this record for shards of ``tokens`` queries and keys."""
        return replace(self, seq_local=tokens, kv_local=tokens)

    def q_tiles(self, block: int) -> int:
        """Return the number of query tiles of ``block`` queries in a shard."""
        return self.q_runs * -(-(self.seq_local // self.q_runs) // block)

    def k_tiles(self, block: int) -> int:
        """Return the number of key tiles of ``block`` keys in a shard."""
        return self.k_runs * -(-(self.kv_local // self.k_runs) // block)

    def array(self, source: str, dtype: str = "float32", name: str = "") -> Array | None:
        """Return the kernel argument for an optional array, or for the array ``name`` computed from it; None without it."""
        return Array(name or source, dtype) if source in self.array_names else None


def call_of(problem: Problem, backend: str, anywhere: bool = False, portable: frozenset[str] = frozenset()) -> RingCall:
    """Return the parameters that the launches of a problem share; the portable kernels run the passes in ``portable``."""
    plan, (b, s, h, d), (_, t, g, _) = problem.steps, problem.q_shape, problem.k_shape
    head_split = plan.head_split or HeadSplit(h, g, plan.groups)
    names = {array.name for array in problem.arrays}
    one_run = plan.band_of_one_run is not None
    ordered = isinstance(plan, GlobalPlan)
    if one_run:
        names |= {"extents"}  # in a balanced layout the extents hold the mask too, in local indices
    if 0 in problem.q_shape:
        names -= {"dropout_seed"}  # an empty q has no probabilities to drop
    own_q, own_k = (plan.own_queries, plan.own_keys) if ordered else (None, None)
    return RingCall(
        batch=b,
        seq_local=plan.q_slot if ordered else s * plan.q_shards,
        kv_local=plan.k_slot if ordered else t * plan.k_shards,
        heads=head_split.q_local,
        kv_heads=head_split.k_local,
        head_dim=d,
        v_dim=problem.v_shape[-1],
        q_runs=1 if one_run else len(plan.q_runs[0]),
        k_runs=1 if one_run else len(plan.k_runs[0]),
        dtype=problem.dtypes[0],
        scale=problem.scale,
        softcap=problem.options.softcap,
        dropout_rate=problem.options.dropout_rate,
        array_names=frozenset(names),
        packed=plan.travels or problem.options.values_in_keys,
        aligned="dropout_seed" in names and plan.by_counter and not anywhere,
        zero_masked=plan.blank_keys or not names.isdisjoint({"extents", "key_extents"}) or anywhere,
        fully_masked=problem.blanks or anywhere,
        tf32=backend == "triton_tf32",
        capability=problem.capability,
        tma=problem.tma,
        hopper=backend == "hopper",
        portable=portable,
        values_in_keys=problem.options.values_in_keys,
        ordered=ordered,
        own=(own_q and own_q.runs_and_tokens, own_k and own_k.runs_and_tokens),
    )
