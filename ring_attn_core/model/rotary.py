"""Rotary position embeddings as frozen records, with their inverse frequencies and attention factor.

Without a scaling, pair i of a head rotates by ``base ** (-2 i / head_dim)`` radians a token (arXiv:2104.09864, section 3.4.2). A
scaling stretches the positions of a trained model over a longer context. Each scaling keeps the fraction kept_i of a frequency
and divides the rest by ``factor``:

    f_i    = base ** (-2 i / head_dim)                                              0 <= i < head_dim / 2
    freq_i = f_i (kept_i + (1 - kept_i) / factor)

    Linear   kept_i = 0                                                             arXiv:2306.15595, equation 4
    NTK      kept_i = 1, base multiplied by factor ** (head_dim / (head_dim - 2))   arXiv:2309.00071, definition 1
    YaRN     kept_i = 1 - clamp((i - low) / (high - low)),                          arXiv:2309.00071, section 3.2
             low, high: index of the pair that rotates ``fast`` or ``slow`` times within ``original`` tokens
             (the authors' code rounds low down and high up)
    Llama3   kept_i = clamp((original f_i / 2 pi - low) / (high - low)),            the released code of Llama 3.1
             low, high: numbers of rotations within ``original`` tokens

with clamp(x) = min(max(x, 0), 1). Positions are unchanged, so a shard of a sequence rotates as in the global sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Any, get_args

from ..validation import as_number, hold_numbers
from .checks import check_flags, check_sizes, is_number

MAX_NUMBER = 1e30
"""The largest value of a number in a scaling. It keeps the powers and products of such numbers in the range of floats."""


def _check_numbers(record: Any, least: float, *names: str) -> None:
    """Convert the named fields of a scaling to Python numbers. Raise ValueError if one is not in ``least`` .. ``MAX_NUMBER``."""
    hold_numbers(record, names)
    for name in names:
        value = getattr(record, name)
        if not is_number(value) or value < least:
            raise ValueError(f"{name} of {type(record).__name__} must be a number of at least {least:g}, got {value!r}")
        if value > MAX_NUMBER:
            raise ValueError(f"{name} of {type(record).__name__} must be at most {MAX_NUMBER:g}, got {value!r}")


@dataclass(frozen=True)
class Linear:
    """Position interpolation (Chen et al., arXiv:2306.15595): divides each frequency by ``factor``."""

    factor: float

    def __post_init__(self) -> None:
        _check_numbers(self, 1, "factor")


@dataclass(frozen=True)
class NTK:
    """NTK-aware interpolation (arXiv:2309.00071, definition 1): multiplies the base by ``factor ** (head_dim / (head_dim - 2))``.

    The slowest pair then rotates ``factor`` times more slowly, and the fastest pair rotates as fast as without scaling. Hugging
    Face's "dynamic" scaling by g is NTK with another factor for each sequence length L: ``g L / L0 - (g - 1)`` if L exceeds the
    original length L0. In this class the factor is fixed.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_numbers(self, 1, "factor")


@dataclass(frozen=True)
class YaRN:
    """YaRN (Peng et al., arXiv:2309.00071): divides low frequencies by ``factor``, and scales the scores.

    ``original``: tokens of the context that the model was trained for. A pair that rotates at least ``fast`` times within these
    tokens keeps its frequency. The frequency of a pair that rotates at most ``slow`` times is divided by ``factor``. Between
    these limits, the kept fraction kept_i of the module's formula falls linearly with the pair index i. ``truncate``: round the
    indices of the two limits outwards to integers, as in the authors' code. ``attention_factor`` multiplies cosines and sines, so
    its square multiplies each score. None means ``0.1 ln(factor) + 1`` (equation 22), or with ``mscale`` and ``mscale_all``, as
    in DeepSeek's models, ``(0.1 mscale ln(factor) + 1) / (0.1 mscale_all ln(factor) + 1)``.
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_numbers(self, 1, "factor")
        hold_numbers(self, ("original",))
        check_sizes(original=self.original)
        check_flags(truncate=self.truncate)
        _check_numbers(self, 1e-6, "fast", "slow")
        if self.fast <= self.slow:
            raise ValueError(f"YaRN keeps what turns fast: fast={self.fast!r} must be greater than slow={self.slow!r}")
        passed = [name for name in ("attention_factor", "mscale", "mscale_all") if getattr(self, name) is not None]
        _check_numbers(self, 1e-6, *passed)
        if "attention_factor" not in passed and len(passed) == 1:
            raise ValueError("YaRN takes mscale and mscale_all together, or neither: attention_factor is 0.1 ln(factor) + 1 then")


@dataclass(frozen=True)
class Llama3:
    """The scaling of Llama 3.1 and later: divides low frequencies by ``factor``, as YaRN does, but without an attention factor.

    ``original``: tokens of the context that the model was trained for. A pair that rotates more than ``high`` times within these
    tokens keeps its frequency. The frequency of a pair that rotates less than ``low`` times is divided by ``factor``. Between
    these limits, the kept fraction kept_i of the module's formula grows linearly with the frequency f_i, not with i as in YaRN.
    """

    factor: float
    low: float
    high: float
    original: int

    def __post_init__(self) -> None:
        _check_numbers(self, 1, "factor")
        hold_numbers(self, ("original",))
        check_sizes(original=self.original)
        _check_numbers(self, 1e-6, "low", "high")
        if self.high <= self.low:
            raise ValueError(f"Llama3 keeps what turns often: high={self.high!r} must be greater than low={self.low!r}")


Scaling = Linear | NTK | YaRN | Llama3
SCALINGS: tuple[type, ...] = get_args(Scaling)


@dataclass(frozen=True)
class Rotary:
    """A rotary position embedding: its ``base``, greater than 1, and a ``scaling`` to longer contexts or None."""

    base: float = 10000.0
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        hold_numbers(self, ("base",))
        if not is_number(self.base) or not self.base > 1:
            raise ValueError(
                f"the base of rotary embeddings must be greater than 1, got {self.base!r}: 10000.0 is usual, long contexts take "
                "more"
            )
        if not isinstance(self.scaling, Scaling | None):
            raise ValueError(
                f"the scaling of rotary embeddings must be {', '.join(f'{x.__name__}(...)' for x in SCALINGS)} or None, "
                f"got {self.scaling!r}"
            )
        object.__setattr__(self, "base", float(self.base))


def rotary_of(rotary: Rotary | None, base: float | None) -> Rotary | None:
    """Return the embedding for ``rotary`` and ``rotary_base``, which is short for ``Rotary(base)``; None if both are None."""
    if rotary is None:
        return None if base is None else Rotary(base)
    if not isinstance(rotary, Rotary):
        raise ValueError(f"rotary must be Rotary(base, scaling) or None, got {rotary!r}: a base alone is rotary_base=")
    if base not in (Rotary.base, rotary.base):
        raise ValueError(f"rotary_base={base!r} contradicts rotary={rotary!r}: pass the base inside Rotary only")
    return rotary


def layer_rotaries(rotaries: Sequence[Rotary | float | None] | None, depth: int) -> tuple[Rotary | None, ...] | None:
    """Return the rotary embedding of each layer, or None if ``rotaries`` is None. A number means ``Rotary(number)``."""
    if rotaries is None:
        return None
    if not isinstance(rotaries, Sequence) or len(rotaries) != depth:
        raise ValueError(
            f"rotaries must be a list of one value for each of {depth} layers, a Rotary, a base, or None for a layer without "
            f"positions, got {rotaries!r}"
        )
    values = map(as_number, rotaries)
    return tuple(x if x is None else Rotary(x) if isinstance(x, int | float) else rotary_of(x, Rotary.base) for x in values)


def check_rotary(head_dim: int, rotary: Rotary) -> None:
    check_sizes(head_dim=head_dim)
    if head_dim % 2:
        raise ValueError(
            f"rotary embeddings turn pairs, so head_dim must be even, got {head_dim}: pass an even head_dim, or rotary_base=None "
            "for attention without positions"
        )
    if head_dim == 2 and isinstance(rotary.scaling, NTK):
        raise ValueError("NTK leaves the fastest pair as it is, and head_dim=2 has no other: take Linear, or a larger head_dim")


def inverse_frequencies(rotary: Rotary, head_dim: int, pair: Any = None) -> Any:
    """Return ``freq_i`` of each pair in radians per token, as floats, or as an array if ``pair``, float64 0, 1, ..., is one."""
    if pair is None:
        return tuple(inverse_frequencies(rotary, head_dim, pair) for pair in range(head_dim // 2))
    base, scaling = rotary.base, rotary.scaling
    if isinstance(scaling, NTK):
        base *= scaling.factor ** (head_dim / (head_dim - 2))
    plain = base ** (-(2 * pair / head_dim))
    if isinstance(scaling, Linear):
        return plain / scaling.factor
    if isinstance(scaling, YaRN):
        low, high = _ramp(scaling, head_dim, base)
        kept = 1 - _clamp((pair - low) / (high - low))
    elif isinstance(scaling, Llama3):
        kept = _clamp((scaling.original / (2 * pi) * plain - scaling.low) / (scaling.high - scaling.low))
    else:
        return plain
    return plain * (kept + (1 - kept) / scaling.factor)


def attention_factor(rotary: Rotary) -> float:
    """Return the factor that multiplies cosines and sines; it is 1 except for YaRN."""
    scaling = rotary.scaling
    if not isinstance(scaling, YaRN):
        return 1.0
    if scaling.attention_factor is not None:
        return float(scaling.attention_factor)
    sharper = lambda mscale: 0.1 * mscale * log(scaling.factor) + 1.0
    if scaling.mscale is None or scaling.mscale_all is None:
        return sharper(1.0)
    return sharper(scaling.mscale) / sharper(scaling.mscale_all)


def _ramp(scaling: YaRN, head_dim: int, base: float) -> tuple[float, float]:
    """Return (low, high): the pair indices i at which a pair rotates ``fast`` and ``slow`` times in the original context.
    ``truncate`` rounds them outwards. low is at least 0, and high at most head_dim - 1."""
    turning = lambda times: head_dim * log(scaling.original / (times * 2 * pi)) / (2 * log(base))
    low, high = turning(scaling.fast), turning(scaling.slow)
    if scaling.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high  # no division by 0, as in the authors' code


def _clamp(x: Any) -> Any:
    """Return ``min(max(x, 0), 1)``, up to rounding, for a float or an array of any framework."""
    return (abs(x) - abs(x - 1) + 1) / 2
