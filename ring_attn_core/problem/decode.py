"""A call of ``tree_attention_decode`` as a record of plain data, with its checks.

A layer's cache takes batch * slots * (kv_heads * (head_dim + v_dim) * bytes of an element + 4) bytes on a rank; 4 bytes hold the
position of a slot. Each kv head serves queries * heads / kv_heads query rows. The kernels (kernels/portable/decode.py) cut these
rows into tiles of up to 64 (32 in float32), and read the keys, values and positions of the kv head once for each tile. They skip
k and v of a slot if its position is outside the range that the rows of the tile may see. ``Case.bytes`` in
benchmarks/decode/candidates.py counts one read of the cache, for v_dim = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..records import hash_once
from ..validation import hold_numbers, in_words, is_integer, number_in_words
from .checks import DTYPES, FARTHEST, INTEGERS, OptionalArray, check_expected, check_scale, check_shapes, check_softcap

FP8 = "float8_e4m3fn"
"""The dtype of one-byte keys and values; they are converted to a wider dtype for the products. Sums are in at least float32."""

SCALES = "k_scale", "v_scale"


class DecodeArrays(NamedTuple):
    """The arrays of a decode call, named like the arguments of ``tree_attention_decode``; None if not passed."""

    q: Any
    k: Any
    v: Any
    q_positions: Any
    k_positions: Any
    tree_mask: Any = None
    sinks: Any = None
    alibi_slopes: Any = None
    k_scale: Any = None
    v_scale: Any = None

    @property
    def depths(self) -> Any:
        """Return the position of each tree node, int32 [b n]: the first node's position plus the node's number of ancestors."""
        return self.q_positions[:, :1] + self.tree_mask.sum(-1, dtype=self.q_positions.dtype) - 1


@hash_once
@dataclass(frozen=True, kw_only=True)
class Decode:
    """One call of ``tree_attention_decode`` on one rank, hashable. Shapes: q ``[batch, queries, heads, head_dim]`` on every rank,
    k ``[batch, slots, kv_heads, head_dim]`` and v ``[batch, slots, kv_heads, v_dim]`` of this rank's part of the cache.
    ``capability``: of the NVIDIA GPU, such as 90, or 0 without a GPU."""

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    dtypes: tuple[str, str, str]
    arrays: tuple[OptionalArray, ...] = ()
    device: str = "cpu"
    capability: int = 0
    multiprocessors: int = 132
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        hold_numbers(self, ("window", "scale", "softcap"))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(array.name for array in self.arrays)

    @property
    def factor(self) -> float:
        """Return the factor by which q . k is multiplied: ``scale``, or ``head_dim ** -0.5`` if ``scale`` is None."""
        return self.q_shape[-1] ** -0.5 if self.scale is None else float(self.scale)

    @property
    def fp8(self) -> bool:
        return self.dtypes[1] == FP8

    def alike(self) -> dict[str, Any]:
        """Return by name the values that must be equal on all ranks. The number of cache slots may differ between ranks."""
        arrays = tuple(
            (array.name, array.shape[:1] if array.name == "k_positions" else array.shape, array.dtype) for array in self.arrays
        )
        same = {name: getattr(self, name) for name in ("q_shape", "dtypes", "device", "window", "softcap", "backend")}
        own = {"kv_heads": self.k_shape[2:3], "v_dim": self.v_shape[3:], "arrays": arrays, "scale": self.factor}
        return same | own

    def check(self) -> None:
        """Raise ValueError if shapes, dtypes, optional arrays or options are invalid or do not fit together."""
        check_shapes(self.q_shape, self.k_shape, self.v_shape, "queries", "slots")
        self._check_dtypes()
        self._check_arrays()
        check_scale(self.scale)
        check_softcap(self.softcap)
        if not isinstance(self.backend, str):
            raise ValueError(f"backend must be its name, a str, got {in_words(self.backend)}")
        if self.window is not None and (not isinstance(self.window, int) or not is_integer(self.window)):
            raise ValueError(f"window must be int or None, a count of positions, got {number_in_words(self.window)}")
        if self.window is not None and not 0 <= self.window < FARTHEST:
            raise ValueError(
                f"window={self.window}: a query sees itself and this many positions before it, 0 to below 2^30; None for all"
            )

    def _check_dtypes(self) -> None:
        q, k, v = self.dtypes
        if q not in DTYPES:
            raise ValueError(f"q must be one of {', '.join(DTYPES)}, got {q}: cast it first")
        if k != v or k not in (q, FP8):
            raise ValueError(f"k and v must both have q's dtype, {q}, or both {FP8}, got k {k} and v {v}: cast them to the same")
        if not self.fp8 and (scaled := self.names & {*SCALES}):
            raise ValueError(f"{min(scaled)} is for k and v of {FP8}, and these are {k}: multiply them where they are written")

    def _check_arrays(self) -> None:
        (b, n, h, _), (_, t, g, _) = self.q_shape, self.k_shape
        expected = {
            "q_positions": ("[batch, queries]", (b, n), INTEGERS),
            "k_positions": ("[batch, slots]", (b, t), INTEGERS),
            "tree_mask": ("[batch, queries, queries]", (b, n, n), ("bool",)),
            "sinks": ("[heads]", (h,), DTYPES),
            "alibi_slopes": ("[heads]", (h,), DTYPES),
            "k_scale": ("[kv_heads]", (g,), ("float32",)),
            "v_scale": ("[kv_heads]", (g,), ("float32",)),
        }
        for array in self.arrays:
            check_expected(array, *expected[array.name])


def check_positions(name: str, farthest: int) -> None:
    """Raise ValueError if the largest position, ``farthest``, does not fit int32, in which kernels compare positions."""
    if farthest >= 2**31:
        raise ValueError(f"{name} holds position {farthest}: positions must be below 2^31")


def check_nodes(q_positions: list[list[int]]) -> None:
    """Raise ValueError if a batch row's positions are not p, p + 1, ... for some p >= 0, as ``tree_mask`` requires."""
    for row, positions in enumerate(q_positions):
        nodes = list(range(positions[0], positions[0] + len(positions))) if positions else []
        if positions != nodes or (positions and positions[0] < 0):
            raise ValueError(
                "with tree_mask the queries of a row are the nodes of a tree, at q_positions p, p + 1, ... where their keys lie, "
                f"and row {row} has {positions[:8]}{' ...' if len(positions) > 8 else ''}: number the nodes in the order of "
                "their slots; tree_mask says which node sees which, and how deep each is"
            )
