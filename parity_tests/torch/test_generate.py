"""Generation in PyTorch: every token is the one that the whole forward says, on any ring, however prompts are cut."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ring_attn_torch import KVCache, RingTransformer, decode_step, from_numpy, prefill_prompts

from ..support.generation import (
    BAD,
    BLIND,
    CASES,
    DRAW,
    FIRST,
    MANY,
    NEW,
    PROMPTS,
    SECOND,
    VALID,
    Logits,
    call,
    check_each,
    check_greedy,
    check_logits,
    given_to_steps,
    made,
    tokens_of_story,
    weights_of,
)
from ..support.selection import one_of_each
from ..support.spawn import PerRank
from .models import Group, shard_fully


def model_of(name: str, group: Group = None, dtype: str = "float64") -> RingTransformer:
    return from_numpy(RingTransformer(**made(name, dtype), group=group), weights_of(name))


@cache
def whole(name: str, dtype: str = "float64") -> Any:
    """``logits_of(ids)``: the whole forward of one device, [tokens, vocab]."""
    model = model_of(name, dtype=dtype)

    def logits_of(ids: Any) -> np.ndarray:
        padded = torch.tensor([[*map(int, ids), *[0] * (len(ids) % 2)]])
        with torch.no_grad():
            return model(padded, length=len(ids))[0, : len(ids)].numpy()

    return logits_of


RINGS = {"features": (1, 2), "grouped": (4,), "windows": (3,), "alibi": (2,)}


def answers_on_rank(group: Group, name: str, new: int) -> list[list[list[int]]]:
    """Greedy tokens of whole prompts and of prompts in chunks, and drawn ones with and without another prompt before them."""
    model = model_of(name, group)
    chunk = None if CASES[name].get("alibi") else 4
    return [
        model.generate(PROMPTS, new),
        model.generate([np.array(x) for x in PROMPTS], new // 4, chunk=chunk),
        model.generate(PROMPTS, 12, **DRAW),
        model.generate([PROMPTS[2], PROMPTS[1]], 12, **DRAW),
    ]


@pytest.mark.parametrize("name", one_of_each(2, CASES))
def test_every_greedy_token_is_the_whole_forwards_on_any_ring_and_drawn_ones_are_the_same_everywhere(gloo, name):
    first, *others = [x for ranks in RINGS[name] for x in gloo(ranks, answers_on_rank, name, NEW)]
    assert all(other == first for other in others)
    greedy, chunked, drawn, beside = first
    check_greedy(greedy, whole(name))
    assert chunked == [new[: NEW // 4] for new in greedy]
    assert drawn[1] == beside[1]  # whatever the other prompts are
    assert drawn[2] != beside[0]  # and another request draws otherwise
    assert drawn[0] != greedy[0][:12]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_512_greedy_tokens_are_the_whole_forwards(gloo, name, ranks):
    for greedy, chunked, *_ in gloo(ranks, answers_on_rank, name, MANY):
        check_greedy(greedy, whole(name))
        assert chunked == [new[: MANY // 4] for new in greedy]


def logits_on_rank(group: Group, name: str, garbage: int) -> Logits:
    """The story of logits; ``garbage``: the id that stands where there is no token."""
    model = model_of(name, group, "float32")
    kept = KVCache.make(model.config, 3, 48, dtype="float32", group=group)
    tokens, got = tokens_of_story(), Logits([], [])
    starts = np.zeros(3, int)
    chunks = (np.array(FIRST),) if CASES[name].get("alibi") else (np.array(FIRST), np.array(SECOND))
    if len(chunks) == 1:
        chunks = (np.add(FIRST, SECOND),)
    for lengths in chunks:
        ids = np.full((3, lengths.max()), garbage)
        for row, (start, n) in enumerate(zip(starts, lengths, strict=True)):
            ids[row, :n] = tokens[row, start : start + n]
        logits, kept = prefill_prompts(model, torch.tensor(ids), kept, lengths.tolist())
        got.chunks.append(logits.numpy())
        starts = starts + lengths
    for ids, valid in zip(given_to_steps(), VALID, strict=True):
        there = torch.tensor(np.where(valid, ids, garbage))
        logits, kept = decode_step(model, there, kept, valid=torch.tensor(valid))
        got.steps.append(logits.numpy())
    assert kept.lengths.tolist() == (starts + VALID.sum((0, 2))).tolist()
    return got


@pytest.mark.parametrize(("ranks", "name"), one_of_each(3, [(ranks, name) for name in CASES for ranks in (1, 2, 4)]))
def test_logits_of_chunks_and_steps_are_the_whole_forwards_whatever_stands_where_no_token_is(gloo, ranks, name):
    truth, plain = (np.stack([whole(name, dtype)(row) for row in tokens_of_story()]) for dtype in ("float64", "float32"))
    results = gloo(ranks, logits_on_rank, name, 0)
    for got in results:
        if len(got.chunks) == 1:  # ALiBi: the prompts came whole, and nothing is known of their middle
            got.chunks.insert(0, np.stack([plain[row, n - 1] for row, n in enumerate(FIRST)]))
        check_logits(got, truth, plain)
        for mine, first in zip((*got.chunks, *got.steps), (*results[0].chunks, *results[0].steps), strict=True):
            np.testing.assert_array_equal(mine, first)  # to the bit on every rank
    for other in gloo(ranks, logits_on_rank, name, 17):
        for valid, steps, others in zip(VALID, results[0].steps, other.steps, strict=True):
            np.testing.assert_array_equal(steps[valid], others[valid])


def test_a_request_ends_with_a_stop_id_and_tokens_come_in_order():
    model = model_of("features")
    free = model.generate(PROMPTS, 12)
    stop = [free[0][4], free[1][7]]
    came: list[tuple[int, int]] = []
    done: list[tuple[int, int]] = []
    progress = lambda now, total: done.append((now, total))
    answers = model.generate(PROMPTS, 12, stop=stop, on_token=lambda *x: came.append(x), chunk=8, progress=progress)
    for new, all_of_them in zip(answers, free, strict=True):
        ends = [i for i, token in enumerate(all_of_them) if token in stop]
        assert new == all_of_them[: ends[0] + 1 if ends else 12]
    assert [[token for request, token in came if request == row] for row in range(3)] == answers
    assert came[:3] == [(row, answers[row][0]) for row in range(3)]
    assert done == [(12, 25), (20, 25), (25, 25)]


def each_on_rank(group: Group, name: str) -> list[list[list[int]]]:
    return check_each(model_of(name, group).generate)


@pytest.mark.parametrize("name", ["features", pytest.param("windows", marks=pytest.mark.exhaustive)])
def test_a_request_with_all_its_tokens_is_left_out_and_needs_no_room(gloo, name):
    """The second prompt fills the cache: a token more of it would be refused."""
    first, *others = [x for ranks in (1, 2) for x in gloo(ranks, each_on_rank, name)]
    assert all(other == first for other in others)


def test_float8_keeps_a_cache_that_generates():
    model = model_of("features", dtype="float32")
    assert len(model.generate(PROMPTS, 9, cache_dtype="float8_e4m3fn", chunk=5)[1]) == 9


def errors_on_rank(group: Group) -> list[str]:
    model = model_of("features", group)
    calls: list[Any] = [lambda c=changes: model.generate(**call(**c)) for changes, _ in BAD.values()]
    for mask, _ in BLIND:
        sizes: dict[str, Any] = made("grouped") | {"mask": mask}
        blind = RingTransformer(**sizes, group=group)
        calls.append(lambda blind=blind: blind.generate(PROMPTS, 1))
    slow = model_of("alibi", group)
    calls.append(lambda: slow.generate(PROMPTS, 1, chunk=20))
    return [message_of(each) for each in calls]


def message_of(function: Any) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def test_invalid_arguments_of_generate_are_refused_in_the_same_words_on_every_rank(gloo):
    first, second = gloo(2, errors_on_rank)
    assert first == second
    expected = [message for _, message in (*BAD.values(), *BLIND)] + ["chunk=20 and ALiBi"]
    for got, message in zip(first, expected, strict=True):
        assert re.search(message, got), (message, got)


def disagreement_on_rank(group: Group, arguments: dict[str, Any]) -> str:
    model = model_of("grouped", group)
    message = message_of(lambda: model.generate(**arguments))
    assert model.generate([[1]], 1) == model.generate([[1]], 1)  # and the ring still works
    return message


def test_ranks_that_are_asked_for_different_things_all_hear_of_it(gloo):
    others: tuple[tuple[dict[str, Any], str], ...] = (
        ({"prompts": [[1], [2]]}, "prompts: '"),
        ({"max_new_tokens": [3, 3, 2]}, "max_new_tokens: [3, 3, 3] on rank 0, [3, 3, 2] on rank 1"),
        ({"seed": 3}, "seed: 0 on rank 0, 3 on rank 1"),
    )
    for changes, message in others:
        got = gloo(2, disagreement_on_rank, PerRank(call(), call(**changes)))
        assert got[0] == got[1]
        assert f"the ranks of this ring disagree on {message}" in got[0]
    got = gloo(2, disagreement_on_rank, PerRank(call(), call(top_k=0)))
    assert got == ["rank 1: top_k must be an int of at least 1, or None for all tokens, got 0"] * 2


def test_no_token_of_a_prompt_is_taken_from_its_padding():
    assert padding_on_rank(None) == "lengths[1]=6: it must be 0 to 5, what ids hold"


def test_ranks_hear_of_lengths_that_one_of_them_alone_has_wrong(gloo):
    assert gloo(2, padding_on_rank) == ["rank 1: lengths[1]=6: it must be 0 to 5, what ids hold"] * 2


def padding_on_rank(group: Group) -> str:
    """Zigzag pads 5 tokens to 6, or 8."""
    model = model_of("grouped", group)
    kept = KVCache.make(model.config, 2, 24, dtype="float64", group=group)
    right = group is not None and dist.get_rank(group) == 0
    return message_of(lambda: prefill_prompts(model, torch.ones(2, 5, dtype=torch.int64), kept, [5, 5 if right else 6]))


def test_autocast_around_it_changes_nothing():
    model = model_of("grouped", dtype="float32")
    with torch.autocast("cpu", torch.bfloat16):
        got = model.generate(PROMPTS, 3, chunk=9)
    assert got == model.generate(PROMPTS, 3, chunk=9)


def test_weights_that_are_split_over_ranks_are_refused(gloo):
    assert gloo(2, split_on_rank) == ["it is"] * 2


def split_on_rank(group: Group) -> str:
    model = model_of("grouped", group)
    shard_fully(group, model)
    with pytest.raises(ValueError, match=r"is a DTensor, split over ranks by FSDP"):
        model.generate(PROMPTS, 1)
    return "it is"
