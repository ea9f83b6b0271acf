"""The package where JAX promotes neither dtypes (``strict``) nor ranks (``raise``) by itself, forward and backward."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType

from ring_attn_core import Run, causal, sliding_window
from ring_attn_jax import (
    KVCache,
    attend_block,
    decode_step,
    document_extents,
    from_layout,
    merge,
    prefill_prompts,
    prefix_extents,
    shard_batch,
    sharded_ring_attention,
    to_layout,
    tree_attention_decode,
)
from ring_attn_jax.layers.rotary import RotaryEmbedding
from ring_attn_jax.layers.transformer import RingTransformer
from ring_attn_jax.training.loss import loss
from ring_attn_jax.training.weights import from_numpy, to_numpy

from ..support.cases import Case
from ..support.combinations import EVERYTHING
from ..support.selection import first
from .ring import REPLICATED, mesh_of, patch_tiles, program, whole


@contextmanager
def promoting(dtypes: str, ranks: str) -> Iterator[None]:
    with jax.numpy_dtype_promotion(dtypes), jax.numpy_rank_promotion(ranks):
        yield


@pytest.fixture(autouse=True)
def nothing_is_promoted() -> Iterator[None]:
    with promoting("strict", "raise"):
        yield


def check_as_usual(program: Callable[..., Any], *arguments: Any) -> None:
    """Assert that ``program``, traced here, where nothing is promoted, has the operations that it has elsewhere."""
    here = operations(program, *arguments)
    with promoting("standard", "allow"):
        usual = operations(program, *arguments)
    assert here == usual


def operations(program: Callable[..., Any], *arguments: Any) -> list[str]:
    """Return the traced operations of ``program`` as text, without the addresses of Python's functions."""
    return re.sub(" at 0x[0-9a-f]+", "", str(jax.make_jaxpr(program)(*arguments))).splitlines()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("case", [Case(), EVERYTHING[-1]], ids=["plain", "every_feature"])
def test_the_ring_and_its_gradient_promote_nothing(case, dtype):
    case = replace(case, ranks=2, dtype=dtype)
    q, k, v, dout, dlse, *features = whole(case)
    with jax.enable_x64(dtype == "float64"), patch_tiles(case):
        arrays = [jnp.asarray(x, dtype) for x in (q, k, v, dout)]
        arguments = {name: jnp.asarray(x) for name, x in zip(case.features, features, strict=True)}
        check_as_usual(program.__wrapped__(case, True).__wrapped__, *arrays, jnp.asarray(dlse), arguments)


@pytest.mark.exhaustive
def test_sharded_ring_attention_with_every_feature():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 8, heads, 4)), jnp.float32) for heads in (4, 2, 2))
    mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "tensor"), axis_types=(AxisType.Auto,) * 3)
    arrays = {
        "extents": to_layout(document_extents(jnp.asarray([[0, 0, 0, 1, 1, 1, 2, -1]] * 2)), "striped", 2),
        "key_mask": jnp.asarray(rng.random((2, 8)) < 0.9),
        "alibi_slopes": jnp.asarray([0.1, 0.2, 0.3, 0.4]),
    }
    options = {"mesh": mesh, "batch_axes": "data", "head_axis": "tensor", "mask": causal(), "softcap": 5.0, "layout": "striped"}
    options |= {"dropout_rate": 0.2, "dropout_seed": 3, "dropout_offset": (2, 4), "length": 7, "return_lse": True}

    def program(q, k, v, sinks):
        def objective(q, k, v, sinks):
            out, lse = sharded_ring_attention(q, k, v, sinks=sinks, **arrays, **options)
            return jnp.square(out).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

        return jax.value_and_grad(objective, (0, 1, 2, 3))(q, k, v, sinks)

    check_as_usual(program, q, k, v, jnp.ones(4))


def test_blocks_and_their_merge_with_every_feature():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 8, heads, 4)), jnp.float32) for heads in (4, 2, 2))
    extents, key_mask = prefix_extents(3, 8), jnp.asarray(rng.random((2, 8)) < 0.7)
    options = {"softcap": 5.0, "alibi_slopes": jnp.asarray([0.1, 0.2, 0.3, 0.4]), "dropout_rate": 0.2, "dropout_seed": 3}

    def program(start, length, q, k, v):
        def objective(q, k, v):
            pairs = [
                attend_block(
                    *(q, k[:, first : first + 4], v[:, first : first + 4]),
                    mask=sliding_window(6, 1),
                    q_run=Run(start, length),
                    k_run=Run(first, 4),
                    extents=jnp.repeat(extents, 2, axis=0),
                    key_mask=key_mask[:, first : first + 4],
                    **options,
                )
                for first in (0, 4)
            ]
            out, lse = merge(*pairs)
            return jnp.square(out).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

        return jax.value_and_grad(objective, (0, 1, 2))(q, k, v)

    check_as_usual(program, jnp.uint32(1), jnp.int32(7), q, k, v)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [{}, {"alibi": True, "sinks": True, "softcap": 5.0, "dropout_rate": 0.2, "qk_norm": True, "qkv_bias": True}],
    ids=["plain", "all"],
)
def test_a_transformer_and_its_loss(options):
    model = RingTransformer(
        vocab=11, dim=16, depth=1, heads=2, kv_heads=1, compute_dtype=jnp.bfloat16, windows=[5], tied=not options, **options,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    graph, parameters = nnx.split(from_numpy(model, to_numpy(model)), nnx.Param)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 9)))
    seed: dict[str, Any] = {"dropout_seed": jnp.uint32(5)} if options else {}

    def step(parameters, ids):
        documents = jnp.asarray([[0] * 4 + [1] * 5] * 2)
        rank = lax.axis_index("seq")
        shard = shard_batch(ids, "zigzag", 2, rank, documents=documents, key_mask=ids > 0, restart_positions=True)

        def objective(parameters):
            extra = {"extents": shard.extents, "key_mask": shard.key_mask}
            logits = nnx.merge(graph, parameters)(shard.ids, shard.positions, shard.length, **extra, **seed)
            return loss(logits, shard.labels)

        return jax.value_and_grad(objective)(parameters)

    check_as_usual(jax.shard_map(step, mesh=mesh_of(2), in_specs=REPLICATED, out_specs=REPLICATED), parameters, ids)


def test_layouts_positions_and_extents():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 9, 2, 8)), jnp.bfloat16)

    def program(x, prefix, ends):
        there = to_layout(x, "zigzag", 2)
        turned = RotaryEmbedding(8)(from_layout(there, "zigzag", 2, 9), jnp.arange(9, dtype=jnp.uint8))
        mask = to_layout(jnp.ones((2, 9), bool), "striped", 2, pad_value=False)
        return there, turned, mask, prefix_extents(prefix, 9), document_extents(cu_seqlens=ends, length=9)

    check_as_usual(program, x, jnp.asarray([2, 5]), jnp.asarray([0, 4, 9]))


@pytest.mark.parametrize("ranks", first([2, 1], 0, 1))
@pytest.mark.parametrize("options", [{}, {"window": 5, "room": 4}, {"dtype": "float8_e4m3fn"}], ids=["plain", "window", "float8"])
def test_prompts_and_steps_over_a_cache(options, ranks):
    wide = {"windows": [5, 3], "alibi": False, "softcap": 5.0, "sinks": True} if "window" in options else {}
    sizes: dict[str, Any] = {"vocab": 11, "dim": 16, "depth": 2, "heads": 4, "kv_heads": 2}
    with promoting("standard", "allow"):
        model = RingTransformer(**sizes, **wide, compute_dtype=jnp.bfloat16, mesh=mesh_of(ranks), rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 8)), jnp.int32)

    def program(state, ids, lengths):
        model, cache = nnx.merge(graph, state), KVCache.make(sizes_of, 2, 32, **options, mesh=mesh_of(ranks))
        prompts, cache = prefill_prompts(model, ids[:, :4], cache, lengths, fresh=True)
        more, cache = prefill_prompts(model, ids[:, 4:], cache, lengths)
        steps, cache = decode_step(model, ids[:, :3], cache, valid=jnp.asarray([[True, False, True], [False, False, True]]))
        last, cache = decode_step(model, ids[:, :1], cache.rollback(cache.lengths - 1))
        cache = cache.fork(0, 1).reset(0)
        arrays = cache.positions, cache.counts, cache.lengths, cache.owners, cache.k_scale, cache.evict(1).k.astype(jnp.float32)
        return prompts, more, steps, last, arrays

    sizes_of = model.config
    check_as_usual(program, state, ids, jnp.asarray([4, 2]))


@pytest.mark.parametrize("ranks", first([2, 1], 0, 1))
def test_a_cache_between_steps_and_generated_text(ranks):
    sizes: dict[str, Any] = {"vocab": 11, "dim": 16, "depth": 1, "heads": 4, "kv_heads": 2, "windows": [3]}

    def played() -> Any:
        model = RingTransformer(**sizes, mesh=mesh_of(ranks), rngs=nnx.Rngs(0))
        sampling: dict[str, Any] = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 3, "stop": [7]}
        texts = model.generate([[1, 2, 3], [4]], 3, chunk=2, cache_dtype="float8_e4m3fn", **sampling)
        cache = KVCache.make(model.config, 2, 8, page=2, mesh=mesh_of(ranks)).check_room([3, 2], "zigzag")
        graph, state = nnx.split(model)
        prompted = jax.jit(lambda state, ids, cache, n: prefill_prompts(nnx.merge(graph, state), ids, cache, n)[1])
        stepped = jax.jit(lambda state, ids, cache: decode_step(nnx.merge(graph, state), ids, cache)[1])
        cache = prompted(state, jnp.ones((2, 3), jnp.int32), cache, jnp.asarray([3, 2]))
        cache = cache.check_room(1).reserve(9).rollback([2, 2]).fork(1, 0).evict(1)
        cache = stepped(state, jnp.ones((2, 1), jnp.int32), cache)
        return texts, np.asarray(cache.k), np.asarray(cache.positions), cache.lengths.tolist()

    here = played()
    with promoting("standard", "allow"):
        usual = played()
    jax.tree.map(np.testing.assert_array_equal, here, usual)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_few_queries_over_a_cache(dtype):
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        q, k, v = (jnp.asarray(rng.standard_normal((2, n, heads, 8)), dtype) for n, heads in ((3, 4), (2048, 2), (2048, 2)))
        where = jnp.broadcast_to(jnp.arange(2048, dtype=jnp.int32), (2, 2048))
        score = {"softcap": 5.0, "sinks": jnp.ones(4), "alibi_slopes": jnp.full(4, 0.1), "window": 1500}
        tree = jnp.asarray([[[True, False, False], [True, True, False], [True, False, True]]] * 2)
        at = jnp.asarray([[2000, 2001, 2002]] * 2, jnp.int32)

        def on_rank(q, k, v, where):
            places = {"q_positions": at, "k_positions": where}
            plain = tree_attention_decode(q, k, v, **places)
            return plain, tree_attention_decode(q, k, v, **places, **score, tree_mask=tree, return_lse=True)

        slots = jax.P(None, "seq")
        specs = REPLICATED, slots, slots, slots
        check_as_usual(jax.shard_map(on_rank, mesh=mesh_of(2), in_specs=specs, out_specs=REPLICATED), q, k, v, where)
