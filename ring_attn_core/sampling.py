"""Sampling of the next token: parameters, checks, and the random bits of the Gumbel-max trick.

    score_i = (logit_i - max logit) / temperature
    kept    = the top_k highest scores in descending order, cut off once their probabilities sum to at least top_p
    token   = argmax over kept of score_i + gumbel_i         so that P(token = i) = softmax over kept of score_i

``drawn`` in ``inference/sampling.py`` of both packages computes the token.
The noise gumbel_i is a pure function of (seed, request, position, token), drawn by the counter-based generators of
:mod:`ring_attn_core.dropout`. So all ranks draw the same token from equal logits. Both frameworks draw the same token too, unless
the two largest ``score_i + gumbel_i`` are equal up to rounding. The tokens of a request do not depend on the rest of the batch.
Among equal logits the lower token id comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .dropout import WORD, Multiply, philox2x32, philox4x32, seed_words
from .validation import as_number, hold_numbers, in_words, is_finite, is_integer

DOMAIN = 1
"""The second word of sampling's Philox counter. Dropout's is 0, so sampling and dropout draw different numbers from one seed."""

ALL_TOKENS, ALL = 2**31 - 1, 2.0
"""A ``top_k`` and a ``top_p`` that keep all tokens."""

MIN_FLOAT = 2.0**-126
"""The smallest normal number of float32; a smaller divisor may be flushed to 0."""


class SamplingParameters(NamedTuple):
    """Sampling parameters in float32 and int32, each None, a number or a list with one for each request, and the seed in two
    words. A ``temperature`` of None or 0 means greedy decoding; None, ``ALL_TOKENS`` and ``ALL`` exclude no token."""

    temperature: Any
    top_k: Any
    top_p: Any
    low: Any
    high: Any
    """The upper 32 bits of the seed; ``low`` holds the lower 32 bits."""


PER_REQUEST = "temperature", "top_k", "top_p"
"""The options that may have a value for each request."""


@dataclass(frozen=True)
class Sampling:
    """Sampling options of a user; each but the seed is one value, or one for each request, stored as a tuple. ``temperature`` 0
    takes the most probable token. ``top_k`` and ``top_p`` restrict the draw to the most probable; None allows all."""

    temperature: Any = 0.0
    top_k: Any = None
    top_p: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        hold_numbers(self, ("seed",))
        for name in PER_REQUEST:
            object.__setattr__(self, name, _as_python(getattr(self, name)))
        for name, x in _each("temperature", self.temperature):
            if not is_finite(x) or x < 0:
                raise ValueError(f"{name} must be a number of at least 0, 0 for the most probable token, got {in_words(x)}")
        for name, x in _each("top_k", self.top_k):
            if x is not None and (not is_integer(x) or x < 1):
                raise ValueError(f"{name} must be an int of at least 1, or None for all tokens, got {in_words(x)}")
        for name, x in _each("top_p", self.top_p):
            if x is not None and (not is_finite(x) or not 0 < x <= 1):
                raise ValueError(f"{name} must be a number above 0 and at most 1, or None for all tokens, got {in_words(x)}")
        self._check_effects()
        if not is_integer(self.seed) or not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be an int that fits in 64 bits with a sign, got {in_words(self.seed)}")

    def _check_effects(self) -> None:
        """Check that ``top_k`` and ``top_p`` have an effect: the temperature of their request is above 0."""
        counts = {len(x) for name in PER_REQUEST if isinstance(x := getattr(self, name), tuple)}
        for i in range(*counts) if len(counts) == 1 else range(not counts):
            temperature, k, p = (x[i] if isinstance(x, tuple) else x for x in (self.temperature, self.top_k, self.top_p))
            if _any(self.temperature):
                k, p = (x if isinstance(setting, tuple) else None for x, setting in ((k, self.top_k), (p, self.top_p)))
            if not temperature and (k, p) != (None, None):
                raise ValueError(
                    f"temperature=0 takes the most probable token, and top_k={k}, top_p={p} have no effect on it"
                    f"{f' (request {i})' if counts else ''}: set a temperature above 0, or leave them out"
                )

    def check_requests(self, count: int) -> None:
        """Raise ValueError if an option is a list that does not have ``count`` values, one for each request."""
        for name in PER_REQUEST:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != count:
                raise ValueError(
                    f"{name} has {len(value)} values, and there are {count} requests: pass one for each, or a number"
                )

    @property
    def parameters(self) -> SamplingParameters:
        """Return these options as sampling parameters, clamped to the ranges of float32 and int32."""
        low, high = seed_words(int(self.seed))
        if not _any(self.temperature):
            return SamplingParameters(None, None, None, low, high)
        temperature = _map_values(self.temperature, lambda x: float(min(max(x, MIN_FLOAT), 1 / MIN_FLOAT)) if x else 0.0)
        k = (
            None
            if self.top_k is None
            else _map_values(self.top_k, lambda x: ALL_TOKENS if x is None else min(int(x), ALL_TOKENS))
        )
        p = (
            None
            if self.top_p in (None, 1)
            else _map_values(self.top_p, lambda x: ALL if x in (None, 1) else max(float(x), MIN_FLOAT))
        )
        return SamplingParameters(temperature, k, p, low, high)


def _as_python(x: Any) -> Any:
    """Convert the value of an option: a number to a Python number, a list or 1-D array to a tuple of Python numbers."""
    if not isinstance(x, list | tuple) and getattr(x, "ndim", 0) == 1:
        x = x.tolist()
    return tuple(map(as_number, x)) if isinstance(x, list | tuple) else as_number(x)


def _each(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the values of an option as pairs (name, value): one pair, or a pair named ``name[i]`` for each request i."""
    return [(f"{name}[{i}]", x) for i, x in enumerate(value)] if isinstance(value, tuple) else [(name, value)]


def _any(value: Any) -> bool:
    return any(value) if isinstance(value, tuple) else bool(value)


def _map_values(value: Any, function: Callable[[Any], Any]) -> Any:
    return list(map(function, value)) if isinstance(value, tuple) else function(value)


def check_drawn(logits: Any, sampling: Sampling, requests: Any, positions: Any) -> None:
    """Check floats [batch, vocab], integers [batch] (or None where allowed), and the lists in ``sampling``."""
    shape, dtype = tuple(getattr(logits, "shape", ())), str(getattr(logits, "dtype", type(logits).__name__))
    if len(shape) != 2 or not shape[1] or "float" not in dtype:
        raise ValueError(
            f"logits must be floats [batch, vocab], one row for each request, got {dtype} {list(shape)}: of what decode_step "
            "returns take logits[:, -1]"
        )
    sampling.check_requests(shape[0])
    if _any(sampling.temperature) and positions is None:
        raise ValueError(
            "positions is missing: at a temperature above 0 a token is drawn by its position, or every step would draw by the "
            "same numbers. Pass how many tokens of each request are cached, cache.lengths"
        )
    for name, value in (("requests", requests), ("positions", positions)):
        if value is not None and not _are_integers(value, shape[0]):
            got = repr(value) if isinstance(value, list | tuple) else in_words(value)
            raise ValueError(f"{name} must be {shape[0]} integers, one for each row of logits, got {got}")


def number_words(numbers: Any) -> Any:
    """Reduce each integer of a list or tuple to its low 32 bits. Return an array unchanged."""
    return [int(x) & WORD for x in numbers] if isinstance(numbers, list | tuple) else numbers


def words(seed: tuple[Any, Any], request: Any, position: Any, token: Any, philox: tuple[Multiply, Any]) -> Any:
    """Return 32 random bits, as an integer, for each (request, position, token) of integers below 2^32 that broadcast. A
    (request, position) pair has a Philox key of 32 bits; two of n pairs share one with a probability of about n^2 / 2^33."""
    nothing = request * 0
    key = philox4x32((nothing, nothing + philox[1](DOMAIN), position, request), seed, *philox)[0]
    return philox2x32((token, token * 0), key, *philox)[0]


def _are_integers(x: Any, number: int) -> bool:
    if isinstance(x, list | tuple):
        return len(x) == number and all(map(is_integer, x))
    return tuple(getattr(x, "shape", ())) == (number,) and "int" in str(getattr(x, "dtype", ""))
