"""Sampling of the next token of each request from its logits, on the device, by the Gumbel-max trick.

``sample`` checks its arguments and calls ``draw``, which the decode loop calls too. ``ring_attn_core/sampling.py`` has the
formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ring_attn_core.sampling import Sampling, SamplingParameters, check_drawn, number_words, words

from ..attend.dropout import multiply
from ..attend.tiles import accumulation_dtype

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def sample(
    logits: Float[Array, "batch vocab"],
    *,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int | None] | None = None,
    top_p: float | Sequence[float | None] | None = None,
    seed: int = 0,
    requests: Int[Array, " batch"] | Sequence[int] | None = None,
    positions: Int[Array, " batch"] | Sequence[int] | None = None,
) -> Int[Array, " batch"]:
    """Draw the next token of each request from its logits. Return int32 [batch].

    ``temperature`` divides the logits; 0 takes the most probable token. ``top_k`` keeps the k most probable tokens. Among these,
    ``top_p`` keeps the most probable ones until their probabilities, renormalized after ``top_k``, sum to at least p. A ``top_k``
    or ``top_p`` of None keeps all. Each of the three is a number, or a list or 1-D array with one number per request. ``seed``:
    the seed of the noise, an int. ``requests``: the index of each request, by default 0, 1, ... ``positions``: the number of
    cached tokens of each request, ``cache.lengths`` after the step that computed the logits. Only the low 32 bits of ``requests``
    and ``positions`` are used.

    The token of a request depends only on its logits and these arguments, not on the rest of the batch. So equal logits give the
    same tokens on all ranks, in both frameworks and in ``RingTransformer.generate``, unless rounding errors decide between two
    tokens. Temperature 0, the default, needs neither ``requests`` nor ``positions``. If a logit is NaN, the token is arbitrary
    and nothing is raised. Logits, requests and positions may be traced.

    Raise ValueError if shapes or dtypes do not fit, if a number is outside its range or traced, if ``top_k`` or ``top_p`` has no
    effect because the temperature is 0, or if ``positions`` is missing at a temperature above 0.
    """
    for name, number in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("seed", seed)):
        if isinstance(number, Tracer):
            raise ValueError(f"{name} is traced, and must be known when the program is: make it a static argument of jit")
    sampling = Sampling(temperature, top_k, top_p, seed)
    check_drawn(logits, sampling, requests, positions)
    parameters = sampling.parameters
    logits = jnp.asarray(logits)
    return draw(logits, parameters, _numbers(requests, logits), _numbers(positions, logits))


def _numbers(numbers: Any, logits: jax.Array) -> jax.Array:
    """Return ``numbers`` as integers [batch], each number of a list modulo 2^32. If they are None, return 0 to batch - 1."""
    if numbers is None:
        return jnp.arange(len(logits), dtype=jnp.int32)
    if isinstance(numbers, list | tuple) and not any(isinstance(x, Tracer) for x in numbers):
        return jnp.asarray(number_words(numbers), jnp.uint32)
    return jnp.asarray(numbers)


def draw(logits: jax.Array, parameters: SamplingParameters, requests: jax.Array, positions: jax.Array) -> jax.Array:
    """Draw the next token of each request from logits [b vocab]; return int32 [b]. Parameters are numbers, arrays [b] or None.

    ``positions`` [b]: the number of cached tokens of each. The arithmetic is that of :mod:`ring_attn_core.sampling`, in float32
    (float64 for float64).
    """
    if parameters.temperature is None:
        return logits.argmax(-1).astype(jnp.int32)
    wide = logits.astype(accumulation_dtype(logits.dtype))
    temperature = _column(parameters.temperature, wide.dtype)
    scores = (wide - wide.max(-1, keepdims=True)) / jnp.where(temperature == 0, 1.0, temperature)
    tokens = jnp.broadcast_to(jnp.arange(scores.shape[-1], dtype=jnp.int32), scores.shape)
    if parameters.top_k is not None or parameters.top_p is not None:
        tokens = jnp.argsort(scores, axis=-1, descending=True, stable=True).astype(jnp.int32)
        scores = jnp.take_along_axis(scores, tokens, -1)
        if parameters.top_k is not None:
            rank = jnp.arange(scores.shape[-1], dtype=jnp.int32)
            scores = jnp.where(rank >= _column(parameters.top_k, rank.dtype), -jnp.inf, scores)
        if parameters.top_p is not None:
            p = jax.nn.softmax(scores, -1)
            scores = jnp.where(p.cumsum(-1) - p >= _column(parameters.top_p, p.dtype), -jnp.inf, scores)
    best = (scores + gumbel(parameters, requests, positions, tokens, scores.dtype)).argmax(-1, keepdims=True)
    new = jnp.take_along_axis(tokens, best, -1)[:, 0]
    return jnp.where(temperature[:, 0] == 0, logits.argmax(-1).astype(jnp.int32), new) if temperature.ndim else new


def _column(x: Any, dtype: Any) -> jax.Array:
    """Return ``x`` as an array in ``dtype``: 0-d for a number, [b, 1] for one number per request."""
    numbers = jnp.asarray(x, dtype)
    return numbers[:, None] if numbers.ndim else numbers


def gumbel(parameters: SamplingParameters, requests: jax.Array, positions: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Return Gumbel noise [b n], -log(-log(1 - u)); Philox computes u from seed, request, position and token id [b n]."""
    word = lambda x: x.astype(jnp.uint32)
    at = word(requests)[:, None], word(positions)[:, None]
    seed = jnp.asarray(parameters.low, jnp.uint32), jnp.asarray(parameters.high, jnp.uint32)
    bits = words(seed, *at, word(tokens), (multiply, jnp.uint32))
    uniform = jnp.minimum((bits.astype(dtype) + 0.5) * 2.0**-32, 1 - 2.0**-24)  # float32 would round some values to 1
    return -jnp.log(-jnp.log1p(-uniform))
