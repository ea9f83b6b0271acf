"""The description of a call as a Problem (plain data)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from ring_attn_core.problem.checks import OptionalArray
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem

from ..attend.dropout import DropoutState
from ..attend.launch import capability, makes_descriptors
from ..axes import describe_arrays, dtype_names


class Arrays(NamedTuple):
    """The optional arrays of a call, or their gradients, named like the public arguments; callers pass them by position.

    ``dropout_seed``: the state made from public seed and offset. ``positions``, not public: those of a traced layout.
    """

    extents: jax.Array | None = None
    key_mask: jax.Array | None = None
    sinks: jax.Array | None = None
    alibi_slopes: jax.Array | None = None
    dropout_seed: DropoutState | None = None
    key_extents: jax.Array | None = None
    positions: jax.Array | None = None


def problem_of(q: Any, k: Any, v: Any, arrays: Arrays, ranks: int, options: Options) -> Problem:
    """Describe the call as plain data, without array values."""
    dtypes = dtype_names(q, k, v)
    seed = () if arrays.dropout_seed is None else (OptionalArray("dropout_seed", (), "uint32"),)
    return Problem(
        q.shape,
        k.shape,
        v.shape,
        dtypes,
        jax.default_backend(),
        ranks,
        options,
        describe_arrays(arrays._replace(dropout_seed=None, positions=None)._asdict()) + seed,
        capability(),
        tma=makes_descriptors(),
        traced_layout=arrays.positions is not None,
    )
