"""Models and prompts for generation, and the checks of its results: in numpy, for both frameworks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ring_attn_core import Band, full
from ring_attn_core.reference.tolerance import bound, relative_error
from ring_attn_core.sampling import Sampling

from .models import TRANSFORMER, VOCAB, Arrays, transformer_weights

CASES: dict[str, dict[str, Any]] = {
    "features": {
        "windows": (6, None),
        "softcap": 3.0,
        "sinks": True,
        "tied": False,
        "qk_norm": True,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
    },
    "grouped": {"rotaries": (100.0, None), "kv_heads": 1},
    "windows": {"windows": (5, 9), "sinks": True},
    "alibi": {"alibi": True, "rotary_base": None},
}
"""Models by name. The first has every feature that prefill in chunks supports; in the third every layer has a window."""

PROMPTS = [[5, 9, 2], [int(x) for x in np.random.default_rng(8).integers(0, VOCAB, 21)], [7]]
NEW, MANY = 24, 512

FULL = [PROMPTS[0], [int(x) for x in np.random.default_rng(10).integers(0, VOCAB, 64)], PROMPTS[2]]
EACH = [3, 1, 9]
"""The numbers of new tokens of these prompts. The second prompt alone fills one rank's cache of 64 slots."""
DRAW: dict[str, Any] = {"temperature": 1.3, "top_k": 20, "top_p": 0.95, "seed": 5}

DRAW_EACH: dict[str, Any] = {"temperature": [1.3, 0.0, 4.0], "top_k": [20, None, 2], "top_p": [None, None, 0.9]}
"""Sampling parameters of each of these prompts; the second is greedy."""

FIRST = 7, 2, 4
"""Tokens of each request in the first chunk of the logits test. SECOND gives those of the next, and VALID those of two steps."""
SECOND = 5, 6, 0
VALID = np.array([[[1, 1, 1], [0, 1, 0], [1, 0, 1]], [[0, 0, 1], [1, 1, 0], [1, 1, 1]]], bool)
"""The ``valid`` argument of two steps of three tokens: [steps, requests, tokens]."""


DRAWN = [Sampling(), Sampling(0.7, seed=-3), Sampling(1.0, 5), Sampling(2.0, None, 0.8, 2**62), Sampling(1.5, 9, 0.6, 1)]


def made(name: str, dtype: str = "float64") -> dict[str, Any]:
    """Return the arguments of the model of a case."""
    return TRANSFORMER | CASES[name] | {"param_dtype": dtype}


def weights_of(name: str) -> Arrays:
    """Return the weights of a case, twice as large as those of the layer tests, so that tokens depend on each other."""
    return {n: w * (2 if w.ndim > 1 else 1) for n, w in transformer_weights(**CASES[name]).items()}


def check_greedy(answers: Sequence[Sequence[int]], logits_of: Callable[[list[int]], np.ndarray], prompts: Any = PROMPTS) -> None:
    """Assert that every new token is the most probable one after all tokens before it; ``logits_of(ids)``: [tokens, vocab]."""
    for prompt, new in zip(prompts, answers, strict=True):
        logits = logits_of([*prompt, *new])
        assert list(new) == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


class Logits(NamedTuple):
    """The logits of a framework's story: [requests, vocab] after each chunk, [requests, 3, vocab] of each step."""

    chunks: list[np.ndarray]
    steps: list[np.ndarray]


def tokens_of_story() -> np.ndarray:
    """Return the tokens of the story's requests, [requests, tokens]."""
    return np.random.default_rng(9).integers(0, VOCAB, (3, 24)).astype(np.int32)


def given_to_steps() -> list[np.ndarray]:
    """Return the ids of each step, [requests, 3]: the next tokens at VALID, 0 elsewhere."""
    tokens, at, steps = tokens_of_story(), np.add(FIRST, SECOND), []
    for valid in VALID:
        ids = np.zeros((3, 3), np.int32)
        for row in range(3):
            ids[row, valid[row]] = tokens[row, at[row] : at[row] + valid[row].sum()]
        at = at + valid.sum(1)
        steps.append(ids)
    return steps


def check_logits(got: Logits, truth: np.ndarray, plain: np.ndarray) -> None:
    """Assert the bound of float32 for the story's logits.

    ``truth`` and ``plain`` [requests, tokens, vocab] come from the whole forward in float64 and in float32.
    """
    pairs, at = [], np.zeros(3, int)
    for lengths, logits in zip((FIRST, SECOND), got.chunks, strict=True):
        at = at + lengths
        pairs += [(logits[row], row, at[row] - 1) for row in range(3) if lengths[row]]
    for valid, logits in zip(VALID, got.steps, strict=True):
        pairs += [(logits[row][valid[row]][i], row, at[row] + i) for row in range(3) for i in range(valid[row].sum())]
        at = at + valid.sum(1)
    mine, exact, naive = (np.stack(x) for x in zip(*((g, truth[r, p], plain[r, p]) for g, r, p in pairs), strict=True))
    assert relative_error(mine, exact) <= bound(naive, exact, "float32")


BAD_DRAWS: dict[str, tuple[dict[str, Any], str]] = {
    "logits of a step": (
        {"logits": (2, 1, 5)},
        r"logits must be floats \[batch, vocab\].*\[2, 1, 5\]: of what decode_step returns",
    ),
    "ids as logits": (
        {"dtype": "int32"},
        r"logits must be floats \[batch, vocab\], one row for each request, got .*int32 \[2, 5\]",
    ),
    "no vocabulary": ({"logits": (2, 0)}, r"logits must be floats \[batch, vocab\]"),
    "no positions": (
        {"temperature": 1.0},
        "positions is missing: .* Pass how many tokens of each request are cached, cache.lengths",
    ),
    "too few positions": ({"temperature": 1.0, "positions": [3]}, r"positions must be 2 integers.* got \[3\]"),
    "floats": ({"temperature": 1.0, "positions": [3, 0.5]}, r"positions must be 2 integers.* got \[3, 0.5\]"),
    "bools": ({"requests": [True, False]}, "requests must be 2 integers, one for each row of logits"),
    "one for all": ({"requests": 3}, "requests must be 2 integers, one for each row of logits, got 3"),
    "an array": ({"requests": np.ones((2, 1), np.int32)}, r"requests must be 2 integers.* got ndarray of shape \[2, 1\]"),
    "top_p of nothing": ({"top_p": 0.5}, "temperature=0 takes the most probable token"),
    "temperature": ({"temperature": -1.0}, "temperature must be a number of at least 0"),
    "too many temperatures": (
        {"temperature": [0.0] * 3},
        "temperature has 3 values, and there are 2 requests: pass one for each",
    ),
}
"""Refused arguments of sample, with the error: the shape and dtype of the logits, and other arguments by value."""

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompts": []}, "prompts must be a list of lists of token ids, at least one"),
    "one prompt as it is": ({"prompts": [1, 2]}, r"prompts\[0\] must be a list of token ids, got 1: for one prompt pass \[ids\]"),
    "text": ({"prompts": "text"}, r"got text: encode it with the model's tokenizer first, or.* by list\(text.encode\(\)\)"),
    "texts": ({"prompts": [[1], "text"]}, "got text: encode it with the model's tokenizer first"),
    "bytes": ({"prompts": [b"text"]}, "got text: encode it with the model's tokenizer first"),
    "an empty prompt": ({"prompts": [[1], []]}, "prompt 1 is empty"),
    "a float": ({"prompts": [[1.5]]}, r"prompts\[0\] must hold token ids, ints, and has 1.5"),
    "another vocabulary": ({"prompts": [[1, VOCAB]]}, f"prompt 0 holds {VOCAB}, and a vocabulary of {VOCAB} has 0 to"),
    "a negative id": ({"prompts": [[-1]]}, "prompt 0 holds -1"),
    "no new token": ({"max_new_tokens": 0}, "max_new_tokens must be an int of at least 1, got 0"),
    "no new token of one": ({"max_new_tokens": [3, 0, 2]}, r"max_new_tokens\[1\] must be an int of at least 1, got 0"),
    "more new tokens than a cache has slots": (
        {"max_new_tokens": 10**30},
        f"max_new_tokens=1{'0' * 30}, and the cache is made for",
    ),
    "a bool of new tokens": ({"max_new_tokens": True}, "max_new_tokens must be an int of at least 1, got True"),
    "a bool among them": ({"max_new_tokens": [3, 2, True]}, r"max_new_tokens\[2\] must be an int of at least 1, got True"),
    "too few numbers": ({"max_new_tokens": [3, 9]}, "max_new_tokens has 2 numbers, and there are 3 prompts: pass one for each"),
    "temperature": ({"temperature": -0.5}, "temperature must be a number of at least 0"),
    "top_k": ({"top_k": 0}, "top_k must be an int of at least 1"),
    "top_p": ({"top_p": 0.0}, "top_p must be a number above 0 and at most 1"),
    "top_p above": ({"top_p": 1.5}, "top_p must be a number above 0 and at most 1"),
    "a temperature of one": ({"temperature": [1.0, -1.0, 0.0]}, r"temperature\[1\] must be a number of at least 0, .* got -1.0"),
    "too few top_k": (
        {"temperature": 1.0, "top_k": [1, None]},
        "top_k has 2 values, and there are 3 requests: pass one for each",
    ),
    "a bool of top_p": ({"temperature": 1.0, "top_p": [0.5, None, True]}, r"top_p\[2\] must be a number above 0 .* got True"),
    "top_k of a greedy one": (
        {"temperature": [1.0, 0.0, 1.0], "top_k": [None, 5, 1]},
        r"temperature=0 takes the most probable token, and top_k=5, top_p=None have no effect on it \(request 1\)",
    ),
    "top_k of nothing": ({"top_k": 5}, "temperature=0 takes the most probable token, and top_k=5, top_p=None have no effect"),
    "seed": ({"seed": 2**63}, "seed must be an int that fits in 64 bits"),
    "stop": ({"stop": [VOCAB]}, f"stop holds {VOCAB}"),
    "stop as text": ({"stop": "."}, "stop must be token ids, ints, at which a request ends, got '.'"),
    "stop of floats": ({"stop": [5.0]}, "stop must be token ids, ints, at which a request ends, and has 5.0"),
    "a class for a dtype": ({"cache_dtype": np.float16}, "cache_dtype must be one of .*, got the class float16"),
    "chunk": ({"chunk": 0}, "chunk must be an int of at least 1"),
    "cache": ({"cache_dtype": "int8"}, "cache_dtype must be one of float64, float8_e4m3fn"),
    "no function": ({"on_token": 3}, "on_token must be a function or None"),
}
"""Refused arguments of generate, with the error."""

BLIND: tuple[tuple[Band, str], ...] = ((full(), "layer 0 has the mask"), (Band(-1, 3), "layer 0 has the mask"))
"""Masks that generation refuses."""


def check_numbers(generate: Callable[..., list[list[int]]], **options: Any) -> list[list[int]]:
    """Assert that a call with a number of new tokens for each request equals calls with one for all. Return its tokens."""
    got = generate(FULL, EACH, **options)
    assert list(map(len, got)) == EACH
    assert got == [generate(FULL, new, **options)[row] for row, new in enumerate(EACH)]
    return got


def check_each(generate: Callable[..., list[list[int]]]) -> list[list[list[int]]]:
    """Assert that a call with numbers for each request, of new tokens and of sampling, equals calls with one number for all.

    Return the greedy tokens, the drawn ones, and those drawn by numbers of each request.
    """
    answers = [check_numbers(generate, **options) for options in ({}, DRAW)]
    got = generate(FULL, 9, **DRAW_EACH, seed=5)
    own = [{name: values[row] for name, values in DRAW_EACH.items()} for row in range(len(FULL))]
    assert got == [generate(FULL, 9, **options, seed=5)[row] for row, options in enumerate(own)]
    assert generate(FULL, 9, **DRAW_EACH | {"top_k": 3}, seed=5)[1] == got[1]  # greedy, whatever others keep
    return [*answers, got]


def call(**changes: Any) -> dict[str, Any]:
    """Return arguments of generate."""
    return {"prompts": PROMPTS, "max_new_tokens": 3} | changes
