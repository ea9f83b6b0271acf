"""A batch whose tokens cannot lie where its extents place them is refused by RingTransformer, or gives NaN under jit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from ring_attn_core import causal, full
from ring_attn_jax import RingTransformer, document_extents, gather, ring_attention, shard_batch, sharded_ring_attention

from ..support.selection import first
from .ring import mesh_of

GIVEN: dict[str, dict[str, Any]] = {
    "tree": {"tree": ([-1, 0, 0], [8, 14, 10])},
    "documents": {"documents": jnp.arange(32)[None] // 8 * 8},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "explicit"), first([("tree", False), ("documents", True), ("documents", False), ("tree", True)], 1, 2)
)
def test_a_model_without_the_layout_of_its_shard_raises_or_gives_nan_under_jit(kind, explicit):
    shard = shard_batch(jnp.arange(32)[None], "balanced", 4, **GIVEN[kind])
    mesh = jax.make_mesh((4,), ("seq",)) if explicit else mesh_of(4)
    arrays = shard.ids, shard.positions, shard.extents, shard.key_extents

    def call(model: Any, arrays: Any, layout: Any) -> Any:
        ids, positions, extents, key_extents = arrays
        how = {"extents": extents, "key_extents": key_extents, "longest_path": shard.longest_path, "layout": layout}
        return model(ids, positions, int(shard.length), **how)

    with jax.set_mesh(mesh) if explicit else nullcontext():
        model = RingTransformer(vocab=99, dim=16, depth=1, heads=4, mesh=mesh, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match=r"pass the layout by which .*, layout=shard.layout for a balanced one"):
            call(model, arrays, None)
        jitted = nnx.jit(call, static_argnums=2)
        assert jnp.isnan(jitted(model, arrays, None)).any()
        assert jnp.isfinite(jitted(model, arrays, shard.layout)).all()


@pytest.mark.parametrize("kind", first(GIVEN, 0, 1))
def test_a_model_inside_shard_map_without_the_layout_of_its_shard_gives_nan(kind):
    shard = shard_batch(jnp.arange(32)[None], "balanced", 4, **GIVEN[kind])
    model, weights = nnx.split(RingTransformer(vocab=99, dim=16, depth=1, heads=4, rngs=nnx.Rngs(0)))

    def logits(layout: Any) -> Any:
        def call(weights: Any, shard: Any) -> Any:
            how = {"extents": shard.extents, "key_extents": shard.key_extents, "longest_path": shard.longest_path}
            return nnx.merge(model, weights)(shard.ids, shard.positions, int(shard.length), **how, layout=layout)

        mapped = jax.shard_map(call, mesh=mesh_of(4), in_specs=(jax.P(), jax.P(None, "seq")), out_specs=jax.P(None, "seq"))
        return jax.jit(mapped)(weights, shard)

    assert jnp.isnan(logits(None)).any()
    assert jnp.isfinite(logits(shard.layout)).all()


@pytest.mark.parametrize(("mask", "length", "refused"), first([(causal(), 8, True), (causal(), 6, False), (full(), 8, False)]))
def test_an_extent_that_begins_after_its_query_is_refused_under_a_causal_mask(mask, length, refused):
    extents = jnp.tile(jnp.asarray([0, 6]), (1, 8, 1)).at[0, 6].set(jnp.asarray([7, 8]))  # with length 6 of a padded query
    model = RingTransformer(vocab=9, dim=8, depth=1, heads=2, layout="contiguous", mask=mask, mesh=mesh_of(2), rngs=nnx.Rngs(0))
    words = r"the extent of row 0, position 6 is \[7, 8\], so the query sees no key under a causal mask"
    with pytest.raises(ValueError, match=words) if refused else nullcontext():
        model(jnp.zeros((1, 8), jnp.int32), length=length, extents=extents)


def test_shards_for_another_ring_are_refused_inside_and_outside_of_jit():
    ids, mesh = jnp.arange(64)[None], mesh_of(4)
    model = RingTransformer(vocab=99, dim=16, depth=1, heads=2, mesh=mesh, rngs=nnx.Rngs(0))
    q, forward = jnp.ones((1, 64, 2, 8)), jax.jit(lambda shard: model(shard.ids, shard.positions, shard.length))
    forward.trace(shard_batch(ids, "zigzag", 4))
    inside = lambda call: jax.shard_map(call, mesh=mesh, in_specs=jax.P(None, "seq"), out_specs=jax.P(None, "seq"))
    for ranks, layout in ((8, "zigzag"), (4, "striped")):
        shard = shard_batch(ids, layout, ranks)
        for call in (
            forward.trace,
            lambda shard: model(shard.ids, shard.positions, shard.length),
            lambda shard: sharded_ring_attention(q, q, q, mesh=mesh, length=shard.length),
            lambda shard: jax.eval_shape(inside(lambda q: ring_attention(q, q, q, length=shard.length)), q),
            lambda shard: jax.eval_shape(inside(lambda ids: gather(ids, length=shard.length)), shard.ids),
        ):
            with pytest.raises(ValueError, match=f"made for {ranks} ranks in the layout {layout}, and this ring has 4 in zigzag"):
                call(shard)


def test_a_tree_without_key_extents_and_extents_in_another_order_are_refused():
    mesh, q = mesh_of(4), jnp.ones((1, 64, 2, 8))
    extents = document_extents(jnp.arange(64)[None] // 7)
    tree = shard_batch(jnp.arange(64)[None], "balanced", 4, tree=([-1, 0, 0], [8, 30, 26]))
    mistakes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("extents lie in natural order, and not in the order of the tokens", {"extents": extents}),
        ("extents lie in natural order", {"extents": extents, "mask": full()}),
        ("key_extents lie in natural order", {"key_extents": extents.at[..., 0].set(jnp.arange(64))}),
        ("made for prefix trees, and without key_extents", {"layout": tree.layout}),
    )
    for words, how in mistakes:
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(lambda q, how=how: sharded_ring_attention(q, q, q, mesh=mesh, **how), q)
