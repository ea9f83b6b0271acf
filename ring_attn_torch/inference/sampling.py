"""Sampling of the next token of each request from its logits, on the device, by the Gumbel-max trick.

``sample`` checks its arguments and calls ``draw``, which the decode loop calls too. ``ring_attn_core/sampling.py`` has the
formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ring_attn_core.dropout import WORD
from ring_attn_core.sampling import Sampling, SamplingParameters, check_drawn, number_words, words

from ..attend.dropout import multiply
from ..attend.tiles import accumulation_dtype
from ..call.autograd import no_autocast

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def sample(
    logits: Float[Tensor, "batch vocab"],
    *,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int | None] | None = None,
    top_p: float | Sequence[float | None] | None = None,
    seed: int = 0,
    requests: Int[Tensor, " batch"] | Sequence[int] | None = None,
    positions: Int[Tensor, " batch"] | Sequence[int] | None = None,
) -> Int[Tensor, " batch"]:
    """Draw the next token of each request from its logits. Return int64 [batch].

    ``temperature`` divides the logits; 0 takes the most probable token. ``top_k`` keeps the k most probable tokens. Among these,
    ``top_p`` keeps the most probable ones until their probabilities, renormalized after ``top_k``, sum to at least p. A ``top_k``
    or ``top_p`` of None keeps all. Each of the three is a number, or a list or 1-D array with one number per request. ``seed``:
    the seed of the noise, an int. ``requests``: the index of each request, by default 0, 1, ... ``positions``: the number of
    cached tokens of each request, ``cache.lengths`` after the step that computed the logits. Only the low 32 bits of ``requests``
    and ``positions`` are used.

    The token of a request depends only on its logits and these arguments, not on the rest of the batch. So equal logits give the
    same tokens on all ranks, in both frameworks and in ``RingTransformer.generate``, unless rounding errors decide between two
    tokens. Temperature 0, the default, needs neither ``requests`` nor ``positions``. If a logit is NaN, the token is arbitrary
    and nothing is raised. Not differentiable.

    Raise ValueError if shapes or dtypes do not fit, if a number is outside its range, if ``top_k`` or ``top_p`` has no effect
    because the temperature is 0, or if ``positions`` is missing at a temperature above 0.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    check_drawn(logits, sampling, requests, positions)
    logits = torch.as_tensor(logits)
    parameters = on_device(sampling.parameters, logits.device)
    with torch.no_grad(), no_autocast(logits.device.type):
        return draw(logits, parameters, _numbers(requests, logits), _numbers(positions, logits))


def _numbers(numbers: Any, logits: Tensor) -> Tensor:
    """Return the low 32 bits of ``numbers`` as int64 [batch] on the logits' device. If they are None, return 0 to batch - 1."""
    if numbers is None:
        return torch.arange(len(logits), device=logits.device)
    return torch.as_tensor(number_words(numbers), device=logits.device).long() & WORD


def on_device(parameters: SamplingParameters, device: torch.device) -> SamplingParameters:
    lists = {name: x for name, x in parameters._asdict().items() if isinstance(x, list)}
    return parameters._replace(**{name: torch.tensor(x, device=device) for name, x in lists.items()})


def draw(logits: Tensor, parameters: SamplingParameters, requests: Tensor, positions: Tensor) -> Tensor:
    """Draw the next token, int64 [b], of each request from logits [b vocab]. ``positions`` [b]: the cached tokens of each."""
    if parameters.temperature is None:
        return logits.argmax(-1)
    wide = logits.to(accumulation_dtype(logits.dtype))
    greedy = parameters.temperature == 0 if isinstance(parameters.temperature, Tensor) else None
    temperature = parameters.temperature if greedy is None else parameters.temperature.masked_fill(greedy, 1)
    scores = (wide - wide.amax(-1, keepdim=True)) / _column(temperature, wide.dtype)
    tokens = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    if parameters.top_k is not None or parameters.top_p is not None:
        scores, tokens = torch.sort(scores, dim=-1, descending=True, stable=True)
        if parameters.top_k is not None:
            rank = torch.arange(scores.shape[-1], device=scores.device)
            scores = scores.masked_fill(rank >= _column(parameters.top_k, rank.dtype), -torch.inf)
        if parameters.top_p is not None:
            p = scores.softmax(-1)
            scores = scores.masked_fill(p.cumsum(-1) - p >= _column(parameters.top_p, p.dtype), -torch.inf)
    best = (scores + gumbel(parameters, requests, positions, tokens, scores.dtype)).argmax(-1, keepdim=True)
    new = tokens.gather(-1, best)[:, 0]
    return new if greedy is None else torch.where(greedy, logits.argmax(-1), new)


def _column(x: Any, dtype: torch.dtype) -> Any:
    return x[:, None].to(dtype) if isinstance(x, Tensor) else x


def gumbel(parameters: SamplingParameters, requests: Tensor, positions: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return Gumbel noise [b n], -log(-log(1 - u)), for the token ids ``tokens`` [b n]; u has 32 bits of Philox."""
    at = requests.long()[:, None], positions.long()[:, None]
    bits = words((parameters.low, parameters.high), *at, tokens, (multiply, int))
    uniform = ((bits.to(dtype) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)  # float32 would round some values to 1
    return -torch.log(-torch.log1p(-uniform))
