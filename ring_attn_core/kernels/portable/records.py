"""Records in which the portable kernels pass parameters and tiles to their helpers.

Kernels have flat parameters, because a launch passes them by name; their helpers take these records. A field is None if the
call does not have the array or feature that the field stands for.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Columns(NamedTuple):
    """The columns of an array [batch, tokens, HEADS, STRIDE] in a tile: WIDTH from COLUMN on, padded to COLUMNS."""

    HEADS: Any
    STRIDE: Any
    COLUMN: Any
    WIDTH: Any
    COLUMNS: Any
    TMA: Any


class KernelConstants(NamedTuple):
    """The constants of a kernel that its helpers read, None if absent. ``FOLDED``: the scale is folded into the exponential.
    ``ZERO_MASKED``: the method of ``loads.keep_seen``. ``ALIGNED``: runs have stride 1 and start at multiples of 16.
    ``PRECISION``: of float32 products. ``K_TAIL``: the ``Columns`` of k in a ``Tail``."""

    H: Any
    G: Any
    BLOCK_Q: Any
    BLOCK_K: Any
    Q: Any
    DOUT: Any
    K: Any
    V: Any
    FOLDED: Any
    ZERO_MASKED: Any
    ALIGNED: Any
    PRECISION: Any
    K_TAIL: Any


class KernelArguments(NamedTuple):
    """The arguments of a kernel that its helpers read, None if absent; k and v are pointers or TMA descriptors. ``threshold``:
    random words below it drop a probability. ``rescale``: factor of the kept ones. ``S``, ``T``: tokens of the q and the k/v
    shard."""

    k: Any
    v: Any
    extents: Any
    key_extents: Any
    key_mask: Any
    key_mask_spans: Any
    alibi_slopes: Any
    dropout: Any
    inner: Any
    softcap: Any
    threshold: Any
    rescale: Any
    S: Any
    T: Any


class QueryTile(NamedTuple):
    """The query tile of a program of ``forward`` or ``dq``: local queries ``i`` from ``m0`` on, and ALiBi's ``slope``."""

    batch: Any
    head: Any
    m0: Any
    i: Any
    slope: Any


class Tail(NamedTuple):
    """The columns of q (loaded) and k (pointer or descriptor) from ``v_dim`` on, if the values are the first columns of k."""

    q: Any
    k: Any


class KeyRun(NamedTuple):
    """A run of keys with its ``runs.Row``. Band and extents let each query of a tile see keys ``begin .. end - 1`` of the run."""

    row: Any
    begin: Any
    end: Any


class KeyTile(NamedTuple):
    """The key tile of a program of ``dkv``: loaded ``k`` and ``v`` of one batch row, from local key ``n0`` on."""

    batch: Any
    n0: Any
    k: Any
    v: Any
