"""``dot_product_attention`` on whole arrays over the devices of one process, as the suites for JAX call it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from ring_attn_jax import from_layout, full, ring_attention, to_layout
from ring_attn_jax.functional import dot_product_attention

from .one import SETTINGS, in_place

LAYOUT = "zigzag"


def attend(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, softcap: Any = None, **arguments: Any) -> Any:
    """Call ours on one device, or cut the arrays into shards of a ring and join the results."""
    call = partial(dot_product_attention, bias=bias, mask=mask, **arguments)
    if softcap is not None:  # jax.nn's function has none, and refuses it beside a bias or a mask
        plain = bias is None and mask is None
        call = partial(ring_attention, mask=full(), softcap=softcap, **arguments) if plain else partial(call, softcap=softcap)
    if SETTINGS.ranks == 1 and softcap is None:
        return in_place(call, query, key, value, axis_name=None)
    lengths = {"length": query.shape[-3], "kv_length": key.shape[-3]}
    shards = [to_layout(x, LAYOUT, SETTINGS.ranks, dim=x.ndim - 3) for x in (query, key, value)]
    spec = PartitionSpec(*[None] * (query.ndim - 3), "seq")
    mesh = Mesh(np.array(jax.devices()[: SETTINGS.ranks]), ("seq",), axis_types=(AxisType.Auto,))
    inside = partial(call, axis_name="seq", layout=LAYOUT, **lengths)
    ring = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))  # else each operation is compiled
    out = in_place(ring, *shards)
    whole = lambda x, dim: from_layout(x, LAYOUT, SETTINGS.ranks, lengths["length"], dim=dim)
    return jax.tree.map(lambda x: whole(x, query.ndim - 3), out)
