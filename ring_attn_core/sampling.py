"""Sampling of the next token: parameters, checks, and the random bits of the Gumbel-max trick.

    score_i = (logit_i - max logit) / temperature
    kept    = the top_k highest scores, and of them the fewest, highest first, whose probabilities sum to at least top_p
    token   = argmax over kept of score_i + gumbel_i         so that P(token = i) = softmax over kept of score_i

The noise gumbel_i is a pure function of (seed, request, position, token), drawn by the counter-based generators of
:mod:`ring_attn_core.dropout`. All ranks and both frameworks draw the same token, and the tokens of a request do not depend on the
rest of the batch. Between equal logits the lower token id wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from .dropout import WORD, Multiply, philox2x32, philox4x32, seed_words
from .validation import hold_numbers, in_words, is_integer

DOMAIN = 1
"""Counter word of sampling. Dropout has 0 there, so the two draw different numbers from one seed."""


LEAST = 2.0**-126
"""The smallest normal number of float32; a smaller divisor may be flushed to 0."""


class SamplingParameters(NamedTuple):
    """Sampling parameters within the ranges of float32 and int32.

    None means that a parameter is not used; a ``temperature`` of None means greedy decoding.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    low: Any
    high: Any
    """The upper 32 bits of the seed; ``low`` holds the lower ones."""


@dataclass(frozen=True)
class Sampling:
    """Sampling options of a user: temperature, top-k, top-p and the seed.

    ``temperature`` 0 takes the most probable token. ``top_k`` and ``top_p`` restrict the draw to the most probable tokens; None
    allows all. Raise ValueError if a number is out of range, or if ``top_k`` or ``top_p`` is set at ``temperature`` 0.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        hold_numbers(self, ("temperature", "top_k", "top_p", "seed"))
        if not _is_finite(self.temperature) or self.temperature < 0:
            raise ValueError(
                "temperature must be a number of at least 0, 0 for the most probable token, got " + in_words(self.temperature)
            )
        if self.top_k is not None and (not is_integer(self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k must be an int of at least 1, or None for all tokens, got {in_words(self.top_k)}")
        if self.top_p is not None and (not _is_finite(self.top_p) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be a number above 0 and at most 1, or None for all tokens, got {in_words(self.top_p)}")
        if not self.temperature and (self.top_k, self.top_p) != (None, None):
            raise ValueError(
                f"temperature=0 takes the most probable token, and top_k={self.top_k}, top_p={self.top_p} have no effect on it: "
                "set a temperature above 0, or leave them out"
            )
        if not is_integer(self.seed) or not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be an int that fits in 64 bits with a sign, got {in_words(self.seed)}")

    @property
    def parameters(self) -> SamplingParameters:
        """Return these options as sampling parameters, clamped to the ranges of float32 and int32."""
        low, high = seed_words(int(self.seed))
        if not self.temperature:
            return SamplingParameters(None, None, None, low, high)
        k = None if self.top_k is None else min(int(self.top_k), 2**31 - 1)
        p = None if self.top_p in (None, 1) else max(float(self.top_p), LEAST)
        return SamplingParameters(float(min(max(self.temperature, LEAST), 1 / LEAST)), k, p, low, high)


def check_drawn(logits: Any, parameters: SamplingParameters, requests: Any, positions: Any) -> None:
    """Raise ValueError if ``logits`` are not floats [batch, vocab], or ``requests`` or ``positions`` not integers [batch].

    Raise ValueError also if ``positions`` is missing at a temperature above 0.
    """
    shape, dtype = tuple(getattr(logits, "shape", ())), str(getattr(logits, "dtype", type(logits).__name__))
    if len(shape) != 2 or not shape[1] or "float" not in dtype:
        raise ValueError(
            f"logits must be floats [batch, vocab], one row for each request, got {dtype} {list(shape)}: of what decode_step "
            "returns take logits[:, -1]"
        )
    if parameters.temperature is not None and positions is None:
        raise ValueError(
            "positions is missing: at a temperature above 0 a token is drawn by its position, or every step would draw by the "
            "same numbers. Pass how many tokens of each request are cached, cache.lengths"
        )
    for name, value in (("requests", requests), ("positions", positions)):
        if value is not None and not _are_integers(value, shape[0]):
            got = repr(value) if isinstance(value, list | tuple) else in_words(value)
            raise ValueError(f"{name} must be {shape[0]} integers, one for each row of logits, got {got}")


def number_words(numbers: Any) -> Any:
    """Reduce each integer in a list to its low 32 bits. Return an array unchanged."""
    return [int(x) & WORD for x in numbers] if isinstance(numbers, list | tuple) else numbers


def words(seed: tuple[Any, Any], request: Any, position: Any, token: Any, philox: tuple[Multiply, Any]) -> Any:
    """Return 32 random bits for each (request, position, token) triple.

    ``philox``: the arguments ``multiply`` and ``word`` of ``philox4x32``. All others are integers below 2^32 that broadcast. The
    Philox key of a (request, position) pair is one word, so the probability that any two of n pairs share a key is about n^2 /
    2^33.
    """
    nothing = request * 0
    key = philox4x32((nothing, nothing + philox[1](DOMAIN), position, request), seed, *philox)[0]
    return philox2x32((token, token * 0), key, *philox)[0]


def _are_integers(x: Any, number: int) -> bool:
    if isinstance(x, list | tuple):
        return len(x) == number and all(map(is_integer, x))
    return tuple(getattr(x, "shape", ())) == (number,) and "int" in str(getattr(x, "dtype", ""))


def _is_finite(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and -math.inf < x < math.inf
