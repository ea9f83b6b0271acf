"""The recurrent layers of hybrid models: their configs, their first decays, and what a model with such layers refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..masks import causal
from ..problem.recurrence import refuse_striped
from ..runs import Band
from ..validation import hold_numbers, in_words
from .checks import check_dtype, check_eps, check_flags, check_sizes

MIXERS = "attention", "gated_delta_net", "mamba2"

StateShapes = tuple[tuple[int, ...], tuple[int, ...]]
"""The shapes of what a layer keeps of a request: its convolution's last tokens [taps - 1, channels], and its state."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """The config of a GatedDeltaNet: its arguments without ``rngs`` and the ring. None becomes a number: ``key_heads`` heads,
    ``key_dim`` and ``value_dim`` dim / heads. Raise ValueError if sizes do not fit together."""

    dim: int
    heads: int
    key_heads: int = None  # type: ignore[assignment]  # filled in below, an int from then on
    key_dim: int = None  # type: ignore[assignment]
    value_dim: int = None  # type: ignore[assignment]
    taps: int = 4
    eps: float = 1e-6
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        _fill(self, key_heads=self.heads, key_dim=None, value_dim=None)
        check_sizes(key_heads=self.key_heads, key_dim=self.key_dim, value_dim=self.value_dim)
        _check_divides("key_heads", self.key_heads, self.heads)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Return the channels of q, k and v in the convolution."""
        return self.key_heads * self.key_dim, self.key_heads * self.key_dim, self.heads * self.value_dim

    @property
    def state_shapes(self) -> StateShapes:
        return (self.taps - 1, sum(self.parts)), (self.heads, self.key_dim, self.value_dim)

    @property
    def products(self) -> int:
        """Return the multiplications of a token by weights and, three times, by the state: read by k, updated, read by q."""
        inner = self.heads * self.value_dim
        return self.dim * (sum(self.parts) + 2 * inner + 2 * self.heads) + 3 * inner * self.key_dim


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """The config of a Mamba2: its arguments without ``rngs`` and the ring. ``head_dim`` None becomes 2 dim / heads. Raise
    ValueError if sizes do not fit together."""

    dim: int
    heads: int
    head_dim: int = None  # type: ignore[assignment]  # filled in below, an int from then on
    state: int = 128
    groups: int = 1
    taps: int = 4
    bias: bool = False
    conv_bias: bool = True
    eps: float = 1e-5
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        _fill(self, head_dim=None)
        check_sizes(head_dim=self.head_dim, state=self.state, groups=self.groups)
        check_flags(bias=self.bias, conv_bias=self.conv_bias)
        _check_divides("groups", self.groups, self.heads)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Return the channels of x, B and C in the convolution."""
        return self.heads * self.head_dim, self.groups * self.state, self.groups * self.state

    @property
    def state_shapes(self) -> StateShapes:
        return (self.taps - 1, sum(self.parts)), (self.heads, self.head_dim, self.state)

    @property
    def products(self) -> int:
        """Return the multiplications of a token by weights and, twice, by the state: updated, and read by C."""
        inner = self.heads * self.head_dim
        return self.dim * (sum(self.parts) + 2 * inner + self.heads) + 2 * inner * self.state


def _fill(config: Any, **defaults: int | None) -> None:
    """Check sizes, and replace None by ``defaults``. A default of None is width / heads; width is dim, in a Mamba2 2 dim."""
    hold_numbers(config, [name for name in vars(config) if name != "param_dtype"])
    check_sizes(dim=config.dim, heads=config.heads, taps=config.taps)
    check_eps(config.eps)
    check_dtype("param_dtype", config.param_dtype)
    width = config.dim * (2 if isinstance(config, Mamba2Config) else 1)
    for name, default in defaults.items():
        if getattr(config, name) is not None:
            continue
        if default is None and width % config.heads:
            raise ValueError(
                f"dim={config.dim} cannot be split over heads={config.heads}: choose a number of heads that divides it, or pass "
                f"{name}"
            )
        object.__setattr__(config, name, width // config.heads if default is None else default)


def _check_divides(name: str, size: int, heads: int) -> None:
    if heads % size:
        raise ValueError(f"{name}={size} must divide heads={heads}: choose a divisor")


def first_decays(heads: int) -> dict[str, list[float]]:
    """Return the first ``A_log`` and ``dt_bias`` of each head, as in Mamba-2, but evenly spaced instead of drawn.

    A is 1 to 16, and softplus(dt_bias) 0.001 to 0.1 on a log scale, so a head's state loses 0.1 % to 80 % at a token.
    """
    at = [i / max(1, heads - 1) for i in range(heads)]
    steps = [0.001 * 100**x for x in at]
    return {"A_log": [math.log(1 + 15 * x) for x in at], "dt_bias": [x + math.log(-math.expm1(-x)) for x in steps]}


def check_mixers(mixers: Any, depth: int, mask: Band, **by_layer: Sequence[Any] | None) -> tuple[str, ...] | None:
    """Return a model's mixers as a tuple, None if all are attention. Raise ValueError if they are not one name for each layer, or
    if beside a recurrent layer the mask is not causal() or windows or rotaries, ``by_layer``, have a value at that layer."""
    if mixers is None:
        return None
    names = isinstance(mixers, Sequence) and not isinstance(mixers, str) and all(x in MIXERS for x in mixers)
    if not names or len(mixers) != depth:
        got = in_words(mixers) if not isinstance(mixers, list | tuple) else f"{len(mixers)}: {', '.join(map(in_words, mixers))}"
        raise ValueError(f"mixers must be a list with one of {', '.join(MIXERS)} for each of {depth} layers, got {got}")
    mixers = tuple(mixers)
    recurrent = recurrent_layers(mixers)
    if not recurrent:
        return None
    if mask != causal():
        raise ValueError(
            f"layer {recurrent[0]} is {mixers[recurrent[0]]}, which sees all earlier tokens and no later ones, and the mask is "
            f"{mask}: pass mask=causal(), and windows=[...] for attention layers that see fewer"
        )
    for name, values in by_layer.items():
        for layer in recurrent:
            if values is not None and values[layer] is not None:
                raise ValueError(f"{name}[{layer}] must be None: layer {layer} is {mixers[layer]}, which has no {name}")
    return mixers


def recurrent_layers(mixers: Sequence[str] | None) -> list[int]:
    return [layer for layer, name in enumerate(mixers or ()) if name != "attention"]


def places(mixers: Sequence[str] | None, depth: int) -> list[tuple[str, int]]:
    """Return each layer's mixer, and the number of earlier layers with attention or, for a recurrent layer, of recurrent ones."""
    names = mixers or ["attention"] * depth
    recurrent = [name != "attention" for name in names]
    return [(name, recurrent[:i].count(recurrent[i])) for i, name in enumerate(names)]


def check_mixers_order(order: str, name: str) -> None:
    if order == "global":
        raise ValueError(
            f'{name} carries a state from run to run of the ranks, so a model with it cannot keep order="global": pass '
            'order="ring", or make the model without mixers'
        )


def check_mixers_call(mixers: Sequence[str] | None, layout: Any, ranks: int, **masks: object) -> None:
    if not recurrent_layers(mixers):
        return
    refuse_striped(layout, ranks)
    for name, value in masks.items():
        if value is not None:
            raise ValueError(
                f"{name} is a mask of attention, which a recurrence cannot follow: pass documents as extents, pad at the end and "
                "pass length, or make the model without mixers"
            )


def refuse_mixers(what: str, mixers: Sequence[str] | None, remedy: str) -> None:
    """Raise ValueError if a model has recurrent layers. ``what``: the refusal, such as "generate has no state"."""
    if layers := recurrent_layers(mixers):
        raise ValueError(f"{what}, and layer {layers[0]} of this model is {(mixers or ())[layers[0]]}: {remedy}")
