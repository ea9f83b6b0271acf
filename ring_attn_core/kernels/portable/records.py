"""Records in which the portable kernels pass parameters and tiles to their helpers.

Kernels have flat parameters, because a launch passes them by name; their helpers take these records. A field is None if the
call does not have the array or feature that the field stands for.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Columns(NamedTuple):
    """The columns of an array [batch, tokens, HEADS, STRIDE] that a tile holds: WIDTH columns from COLUMN on, padded to COLUMNS.

    ``TMA``: the array is read through a TMA descriptor, and WIDTH is COLUMNS; else through a pointer.
    """

    HEADS: Any
    STRIDE: Any
    COLUMN: Any
    WIDTH: Any
    COLUMNS: Any
    TMA: Any


class KernelConstants(NamedTuple):
    """The constants of a kernel that its helpers read; a constant that the kernel does not have is None.

    ``H``, ``G``: query and key heads. ``Q``, ``DOUT``, ``K``, ``V``: the ``Columns`` of these arrays. ``FOLDED``: the scale is
    folded into the exponential. ``ZERO_MASKED``: whether ``loads.keep_seen`` zeroes unused keys, which may hold NaN (0: no; 1: by
    bools; 2: by bits). ``ALIGNED``: all runs have stride 1 and start at multiples of 16, so one call of Philox serves several
    probabilities. ``PRECISION``: the precision of float32 products. ``K_TAIL``: the ``Columns`` of k in a ``Tail``.
    """

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
    """The arguments of a kernel that its helpers read; an argument that the call does not have is None.

    ``k``, ``v``: pointers or TMA descriptors. ``extents``, ``key_extents``, ``alibi_slopes``: pointers to these arrays.
    ``key_mask``, ``key_mask_spans``: from ``loads.unpack_key_mask``. ``dropout``: from ``dropout.philox_keys``. ``inner``,
    ``softcap``: see ``scores.scores``. ``threshold``: random words below it drop a probability. ``rescale``: factor of the kept
    probabilities. ``S``, ``T``: tokens of the q and the k/v shard.
    """

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
    """The query tile of a program of ``forward`` or ``dq``: local queries ``i`` from ``m0`` on, of one batch row and head.

    ``slope``: the head's ALiBi slope.
    """

    batch: Any
    head: Any
    m0: Any
    i: Any
    slope: Any


class Tail(NamedTuple):
    """The columns of q and k from ``v_dim`` on, if the values are the first ``v_dim`` columns of k (``tile_sizes.tail_of``).

    ``q``: a loaded tile. ``k``: a pointer or TMA descriptor.
    """

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
