"""KVCache and prefill: stories of requests against a model, one token at a time; and steps that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from ring_attn_core import causal
from ring_attn_core.cache.spec import CacheSizes
from ring_attn_core.reference.oracle import exact
from ring_attn_core.reference.tolerance import relative_error

from ..support.caches import check
from ..support.generation import made, weights_of
from ..support.selection import first, in_each, one_of_each
from ..support.stories import CHOSEN, REST, Append, Call, Prefill, Story

PAGES = (Prefill(4, (7, 3), fresh=True), Append(1), Call("reserve", (9,)), Append(4), Call("reserve", (4,)), Append(4))
PAGED = Story(2, PAGES, capacity=8, page=3)


@in_each(
    "story",
    jax=[*first(CHOSEN[::-1]), *first([*REST, PAGED], 0, 0)],
    torch=[*one_of_each(2, [*CHOSEN, *REST]), PAGED],
    slow="jax",
)
def test_every_rank_holds_what_the_model_says_and_prefill_is_attention_over_the_whole_request(framework, story):
    check(story, framework.play(story))


OPERATIONS = (
    Prefill(4, (7, 3), fresh=True),
    Append(3, ((True, True, True), (False, True, False))),
    Prefill(4, (4, 8)),
    Call("rollback", ((12, 11),)),
    Append(3, ((True, False, False), (True, True, True))),
)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), *first(["float8_e4m3fn"], 0)])
def test_frameworks_hold_the_same_and_prefill_alike(frameworks, dtype):
    story = Story(2, OPERATIONS, dtype=dtype, sinks=True)
    theirs, ours = (each.play(story) for each in frameworks)
    for of_ours, of_theirs in zip(ours, theirs, strict=True):
        for a, b in zip(of_ours, of_theirs, strict=True):
            for name in ("positions", "counts", "lengths", "k_scale", "v_scale"):
                np.testing.assert_array_equal(a["cache"][name], b["cache"][name], err_msg=name)
            used = a["cache"]["positions"] >= 0
            for name in "kv":
                np.testing.assert_array_equal(a["cache"][name][:, used], b["cache"][name][:, used], err_msg=name)
            if "out" in a:
                assert relative_error(a["out"], b["out"]) <= 1e-6
    if dtype == "float8_e4m3fn":
        check_float8(story, ours)


def check_float8(story: Story, played: list) -> None:
    """The scales are the least powers of two that hold the first chunk, and later chunks see the rounded earlier ones."""
    import ml_dtypes  # what JAX has its small dtypes from

    (_, first), (_, more), (operation, second), *_ = story.script()
    numbers = [np.concatenate([first[row][first[row] >= 0], more[row][more[row] >= 0]]) for row in range(story.batch)]
    rounded = {}
    for name in "kv":
        largest = np.abs(story.tokens[name][first[first >= 0]]).max((0, 3))
        scale = 2.0 ** np.ceil(np.log2(largest / 448))
        np.testing.assert_array_equal(played[0][0]["cache"][f"{name}_scale"], scale)
        divided = np.clip(story.tokens[name] / scale[..., None], -448, 448)
        rounded[name] = divided.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale[..., None]
    for row in range(story.batch):
        new = second[row][second[row] >= 0]
        for layer in range(story.layers):
            k, v = (np.concatenate([rounded[n][numbers[row], layer], story.tokens[n][new, layer]])[None] for n in "kv")
            q = story.tokens["q"][np.concatenate([numbers[row], new]), layer][None]
            truth = exact(q, k, v, causal(), np.zeros((*q.shape[:3], v.shape[-1])), **story.features).out[0, -len(new) :]
            for rank, got in enumerate(played[2]):
                shard = story.shard(second, rank)[row]
                mine = [int(np.flatnonzero(new == number)[0]) for number in shard if number >= 0]
                assert relative_error(got["out"][layer, row, : len(mine)], truth[mine]) <= 1e-6
    assert operation == OPERATIONS[2]


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([[1], [2]], {}, r"ids must be \[1, tokens\], a row for every request of the cache, got \[2, 1\]"),
        ([[31]], {}, "ids hold 31, and a vocabulary of 31"),
        ([[0.5]], {}, "ids must be integers"),
        ([[1]], {"window": 3}, "layer 0 sees 6 tokens before it, and the cache keeps 3"),
        ([[1]], {"window": 6}, "layer 1 sees all tokens before it, and the cache keeps 6"),
        ([[1]], {"config": CacheSizes(2, 4, 8)}, "make it with KVCache.make"),
        ([[1]], {"dtype": "bfloat16"}, "the cache keeps bfloat16, and the model computes in float32"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_and_the_cache_is_as_it_was(framework, ids, options, message):
    model = framework.make("RingTransformer", **made("features", "float32"), **framework.ring(2))
    framework.from_numpy(model, weights_of("features"))
    given = {"config": model.config, "dtype": "float32"} | framework.ring(2) | options
    kept = framework.KVCache.make(given.pop("config"), 1, 24, **given)
    for function in (framework.decode_step, framework.prefill_prompts):
        with pytest.raises(ValueError, match=message):
            function(model, framework.array(np.array(ids)), kept)
    assert kept.lengths.tolist() == [0]
    assert (kept.positions == -1).all()
