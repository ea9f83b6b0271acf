"""Generation in JAX: every token is the one that the whole forward says, on any ring, however prompts are cut."""

# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportAttributeAccessIssue=false

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ring_attn_jax import KVCache, RingTransformer, decode_step, from_numpy, prefill_prompts
from ring_attn_jax.inference import decode_loop

from ..support.generation import (
    BAD,
    BLIND,
    EACH,
    FIRST,
    FULL,
    MANY,
    NEW,
    PROMPTS,
    SECOND,
    VALID,
    Logits,
    call,
    check_greedy,
    check_logits,
    check_numbers,
    given_to_steps,
    made,
    tokens_of_story,
    weights_of,
)
from ..support.selection import first
from .ring import mesh_of


@lru_cache(maxsize=16)
def model_of(name: str, ranks: int | None = None, dtype: str = "float64") -> RingTransformer:
    mesh = None if ranks is None else mesh_of(ranks)
    return from_numpy(RingTransformer(**made(name, dtype), mesh=mesh, rngs=nnx.Rngs(0)), weights_of(name))


@cache
def whole(name: str, dtype: str = "float64", padded: int = 64) -> Any:
    """``logits_of(ids)``: the whole forward of one device, [tokens, vocab]; later tokens change nothing, so all are as long."""
    graph, state = nnx.split(model_of(name, 1, dtype))
    forward = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids))

    def logits_of(ids: Any) -> np.ndarray:
        row = np.zeros((1, padded), np.int32)
        row[0, : len(ids)] = ids
        return np.asarray(forward(state, row))[0, : len(ids)]

    return logits_of


def answers(name: str, ranks: int | None, chunk: int | None = None, new: int = NEW) -> list[list[int]]:
    with jax.enable_x64(True):
        return model_of(name, ranks).generate(PROMPTS, new, chunk=chunk)


@pytest.mark.parametrize(
    ("name", "ranks", "chunk"),
    [
        ("features", 2, 16),
        pytest.param("features", 4, None, marks=pytest.mark.exhaustive),
        *(pytest.param("features", ranks, chunk, marks=pytest.mark.full) for ranks, chunk in ((None, None), (1, 8), (4, 8))),
        *(pytest.param(name, 2, 8, marks=pytest.mark.full) for name in ("grouped", "windows")),
        pytest.param("alibi", 2, None, marks=pytest.mark.full),
    ],
)
def test_every_greedy_token_is_the_whole_forwards(name, ranks, chunk):
    got = answers(name, ranks, chunk)
    with jax.enable_x64(True):
        check_greedy(got, whole(name))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_512_greedy_tokens_are_the_whole_forwards(ranks):
    got = answers("features", ranks, 16, MANY)
    with jax.enable_x64(True):
        check_greedy(got, whole("features", padded=640))


@pytest.mark.slow
def test_another_call_of_the_same_sizes_compiles_nothing_and_a_stop_id_ends_a_request():
    free = answers("features", None)
    stop = [free[0][4], free[1][7]]
    came: list[tuple[int, int]] = []
    done: list[tuple[int, int]] = []
    with jax.enable_x64(True):
        model = model_of("features")
        placed = decode_loop.PlacedModel.of(model)
        kinds = placed.program(decode_loop.step)._cache_size()
        got = model.generate(
            PROMPTS, NEW - 1, stop=stop, on_token=lambda *x: came.append(x), progress=lambda now, total: done.append((now, total))
        )
        again = model.generate(PROMPTS, NEW - 2, stop=stop)
        assert placed.program(decode_loop.step)._cache_size() == kinds + 1  # for two stop ids instead of none
    assert got == again
    for new, all_of_them in zip(got, free, strict=True):
        ends = [i for i, token in enumerate(all_of_them) if token in stop]
        assert new == all_of_them[: ends[0] + 1 if ends else NEW - 1]
    assert [[token for request, token in came if request == row] for row in range(3)] == got
    assert done == [(25, 25)]


def test_no_program_gets_an_empty_array(monkeypatch):
    """jaxlib 0.11.2 crashes on several GPUs if one does, as without stop ids."""
    given: list[Any] = []
    put = decode_loop.PlacedModel.put
    monkeypatch.setattr(decode_loop.PlacedModel, "put", lambda self, x: given.append(x) or put(self, x))
    answers("features", None)
    assert given and all(np.size(x) for x in jax.tree.leaves(given))


@pytest.mark.parametrize("ranks", first([2, None], 0, 1))
def test_a_request_with_all_its_tokens_is_left_out_and_other_numbers_compile_nothing(ranks, monkeypatch):
    loops: list[decode_loop.DecodeLoop] = []

    class Kept(decode_loop.DecodeLoop):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            loops.append(self)

    monkeypatch.setattr("ring_attn_jax.inference.generate.DecodeLoop", Kept)
    with jax.enable_x64(True):
        model = model_of("features", ranks)
        check_numbers(model.generate)
        functions = decode_loop.first, decode_loop.step, decode_loop.Prefilled(None, fresh=True)
        compiled = list(map(decode_loop.PlacedModel.of(model).program, functions))
        kinds, made = [program._cache_size() for program in compiled], decode_loop.program_of.cache_info().misses
        got = model.generate(FULL, [2, 9, 5])
        assert [program._cache_size() for program in compiled] == kinds
        assert decode_loop.program_of.cache_info().misses == made
    assert list(map(len, got)) == [2, 9, 5]
    for each, cached in zip((EACH, [2, 9, 5]), (loops[0], loops[-1]), strict=True):
        assert cached.cache.lengths.tolist() == [len(prompt) + new - 1 for prompt, new in zip(FULL, each, strict=True)]


def story(name: str, ranks: int, garbage: int) -> Logits:
    """The story of logits; ``garbage``: the id that stands where there is no token."""
    model = model_of(name, ranks, "float32")
    kept = KVCache.make(model.config, 3, 48, dtype="float32", mesh=mesh_of(ranks))
    tokens, got, starts = tokens_of_story(), Logits([], []), np.zeros(3, int)
    graph, state = nnx.split(model)
    merged = lambda state: nnx.merge(graph, state)
    prefilled = jax.jit(lambda state, *x, fresh: prefill_prompts(merged(state), *x, fresh=fresh), static_argnames="fresh")
    stepped = jax.jit(lambda state, ids, kept, valid: decode_step(merged(state), ids, kept, valid=valid))
    for lengths in (np.array(FIRST), np.array(SECOND)):
        ids = np.full((3, 8), garbage, np.int32)
        for row, (start, n) in enumerate(zip(starts, lengths, strict=True)):
            ids[row, :n] = tokens[row, start : start + n]
        logits, kept = prefilled(state, jnp.asarray(ids), kept, jnp.asarray(lengths, jnp.int32), fresh=not starts.any())
        got.chunks.append(np.asarray(logits))
        starts = starts + lengths
    for ids, valid in zip(given_to_steps(), VALID, strict=True):
        logits, kept = stepped(state, jnp.asarray(np.where(valid, ids, garbage)), kept, jnp.asarray(valid))
        got.steps.append(np.asarray(logits))
    assert kept.lengths.tolist() == (starts + VALID.sum((0, 2))).tolist()
    return got


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param("features", 2, marks=pytest.mark.exhaustive),
        *(pytest.param("features", ranks, marks=pytest.mark.full) for ranks in (1, 4)),
        *(pytest.param(name, 2, marks=pytest.mark.full) for name in ("grouped", "windows")),
    ],
)
def test_logits_of_chunks_and_steps_are_the_whole_forwards_whatever_stands_where_no_token_is(name, ranks):
    got, other = (story(name, ranks, garbage) for garbage in (0, 17))
    with jax.enable_x64(True):
        truth = np.stack([whole(name)(row) for row in tokens_of_story()])
    check_logits(got, truth, np.stack([whole(name, "float32")(row) for row in tokens_of_story()]))
    for valid, steps, others in zip(VALID, got.steps, other.steps, strict=True):
        np.testing.assert_array_equal(steps[valid], others[valid])


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_invalid_arguments_of_generate_are_refused(changes, message):
    with jax.enable_x64(True), pytest.raises(ValueError, match=message):
        model_of("features").generate(**call(**changes))


def test_models_that_generate_no_text_are_refused():
    for mask, message in BLIND:
        sizes: dict[str, Any] = made("grouped", "float32") | {"mask": mask}
        blind = RingTransformer(**sizes, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match=message):
            blind.generate(PROMPTS, 1)
    with pytest.raises(ValueError, match="chunk=20 and ALiBi"):
        model_of("alibi", None, "float32").generate(PROMPTS, 1, chunk=20)
    where = {"mesh": jax.make_mesh((1, 2), ("seq", "heads"), devices=jax.devices()[:2]), "head_axis": "heads"}
    with pytest.raises(ValueError, match="head_axis='heads' splits heads over devices"):
        RingTransformer(**made("features", "float32"), **where, rngs=nnx.Rngs(0)).generate(PROMPTS, 1)
    split = RingTransformer(**made("features", "float32"), mesh=mesh_of(2), rngs=nnx.Rngs(0))
    sharding = jax.NamedSharding(jax.make_mesh((2,), ("model",), devices=jax.devices()[:2]), jax.P(None, "model"))
    split.embed.embedding.set_value(jax.device_put(split.embed.embedding.get_value(), sharding))
    with pytest.raises(
        ValueError, match=r"embed.embedding is sharded .* another way than by a jax.NamedSharding over the model's mesh"
    ):
        split.generate(PROMPTS, 1)


def test_text_is_not_generated_inside_jit():
    model = model_of("features", None, "float32")
    calls = (lambda: jax.jit(lambda: model.generate(PROMPTS, 1))(), lambda: nnx.jit(lambda m: m.generate(PROMPTS, 1))(model))
    for call_it in calls:
        with pytest.raises(ValueError, match=r"call it outside of jit. Inside of jit there are decode_step and prefill_prompts"):
            call_it()


NO_CACHE = r"cache must be a KVCache, got .*: make one with KVCache.make\(model.config, ...\)"


@pytest.mark.parametrize(
    ("kept", "message"),
    [(None, NO_CACHE), ({}, NO_CACHE), ("of one device", "the model's ring is 2 ranks along 'seq', and the cache's 1")],
)
def test_an_invalid_cache_or_one_of_another_mesh_is_refused(kept, message):
    model = model_of("features", 2, "float32")
    kept = KVCache.make(model.config, 1, 24, dtype="float32", mesh=mesh_of(1)) if kept == "of one device" else kept
    for function in (decode_step, prefill_prompts):
        with pytest.raises(ValueError, match=message):
            function(model, jnp.ones((1, 1), jnp.int32), kept)


def test_no_token_of_a_prompt_is_taken_from_its_padding():
    """Zigzag pads 5 tokens to 8."""
    model = model_of("features", 2, "float32")
    kept = KVCache.make(model.config, 2, 24, dtype="float32", mesh=mesh_of(2))
    ids, lengths = jnp.ones((2, 5), jnp.int32), jnp.array([4, 7])
    for known in ([4, 7], lengths):
        with pytest.raises(ValueError, match=r"lengths\[1\]=7: it must be 0 to 5, what ids hold"):
            prefill_prompts(model, ids, kept, known)
    cut = jax.jit(lambda kept, lengths: prefill_prompts(model, ids, kept, lengths, fresh=True)[1].lengths)
    assert cut(kept, lengths).tolist() == cut(kept, [4, 7]).tolist() == [4, 5]


def test_room_is_checked_for_lengths_in_an_array():
    kept = KVCache.make(model_of("features", 2, "float32").config, 2, 24, dtype="float32", mesh=mesh_of(2))
    assert kept.check_room(jnp.array([24, 7]), "zigzag") is kept
    with pytest.raises(ValueError, match="request 1 has 0 tokens, and 25 more exceed the capacity of 24"):
        kept.check_room(jnp.array([7, 25]))


def test_a_chunk_of_traced_lengths_may_fill_the_room_of_a_window():
    """Four tokens over four ranks in zigzag are padded to eight, which do not count."""
    mesh = mesh_of(4)
    model = RingTransformer(vocab=31, dim=16, depth=1, heads=2, windows=(4,), mesh=mesh, rngs=nnx.Rngs(0))
    kept = KVCache.make(model.config, 2, window=4, room=4, mesh=mesh)
    step = lambda tokens: lambda lengths: prefill_prompts(model, jnp.ones((2, tokens), jnp.int32), kept, lengths)[0]
    assert jax.eval_shape(step(4), jnp.array([4, 3])).shape == (2, 31)
    assert jax.eval_shape(lambda: step(5)([4, 3])).shape == (2, 31)
    with pytest.raises(ValueError, match="a step of 5 tokens, and this cache has room for 4"):
        jax.eval_shape(step(5), jnp.array([4, 3]))
