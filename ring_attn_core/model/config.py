"""The configs of layers and models as frozen dataclasses, which check their fields and fill in defaults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..masks import causal, check_mask
from ..plan.batches import ComputeCost
from ..runs import Band
from ..validation import hold_numbers, in_words
from .as_json import read_record, write_record
from .checks import DEEPEST, check_dtype, check_eps, check_flags, check_scores, check_sizes, head_sizes
from .chunks import check_chunk
from .masks import layer_masks
from .mixers import GatedDeltaNetConfig, Mamba2Config, check_mixers
from .published import Published
from .rotary import Rotary, check_rotary, layer_rotaries, rotary_of


@dataclass(frozen=True, kw_only=True)
class AttentionFields:
    """The fields that both the config of an attention layer and the config of a model have."""

    kv_heads: int = None  # type: ignore[assignment]  # filled in by a config, an int from then on
    head_dim: int = None  # type: ignore[assignment]
    mask: Band = causal()  # noqa: RUF009  # a Band is frozen
    rotary_base: float | None = 10000.0
    rotary: Rotary | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    eps: float = 1e-6
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    dropout_rate: float = 0.0
    param_dtype: str = "float32"

    @property
    def arguments(self) -> dict[str, Any]:
        return {x.name: getattr(self, x.name) for x in fields(self)}


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(AttentionFields):
    """The config of a RingAttention: all arguments except ``rngs`` and those that choose the ring and how attention runs on it.

    ``kv_heads=None`` becomes ``heads``, and ``head_dim=None`` becomes ``dim / heads``. ``rotary=None`` becomes
    ``Rotary(rotary_base)``, or stays None if ``rotary_base`` is None too. ``param_dtype``: the name of a dtype. Raise ValueError
    if sizes do not fit together or a value is invalid.
    """

    dim: int
    heads: int

    def __post_init__(self) -> None:
        hold_numbers(self, ("dim", "heads", "kv_heads", "head_dim", "rotary_base", "eps", "softcap", "dropout_rate"))
        kv_heads, head_dim = head_sizes(self.dim, self.heads, self.kv_heads, self.head_dim)
        check_mask(self.mask)
        rotary = rotary_of(self.rotary, self.rotary_base)
        if rotary is not None:
            check_rotary(head_dim, rotary)
        check_flags(qk_norm=self.qk_norm, qkv_bias=self.qkv_bias, o_bias=self.o_bias)
        check_eps(self.eps)
        check_scores(self.softcap, self.sinks, self.alibi, self.dropout_rate)
        check_dtype("param_dtype", self.param_dtype)
        filled = {"kv_heads": kv_heads, "head_dim": head_dim, "rotary": rotary, "rotary_base": rotary and rotary.base}
        for name, value in filled.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class SparseConfig(AttentionConfig):
    """The config of a dilated or summary attention layer. Fields that such a layer does not support keep their defaults."""

    o_bias: bool = field(default=False, init=False)
    sinks: bool = field(default=False, init=False)
    alibi: bool = field(default=False, init=False)
    dropout_rate: float = field(default=0.0, init=False)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(AttentionFields):
    """The config of a RingTransformer, the same in both frameworks and in JSON.

    It holds all arguments of a RingTransformer except ``rngs``, ``auto_shard``, ``activations``, and those that choose the ring
    and how attention runs on it. ``hidden=None`` becomes ``hidden_size(dim)``; other defaults are as in :class:`AttentionConfig`.
    ``windows``, ``rotaries`` and ``mixers``: one value per layer, or None. The mask, dropout and attention's options are of
    attention layers alone; with recurrent layers the mask must be ``causal()``. ``param_dtype``, ``compute_dtype``: names of
    dtypes; ``compute_dtype=None`` means ``param_dtype``. ``mlp_chunk``: the maximum number of a rank's tokens that the MLP
    computes at a time, None for all. ``published``: metadata of a Hugging Face config; the computation and ``==`` ignore it.
    Raise ValueError if sizes do not fit together or a value is invalid.
    """

    vocab: int
    dim: int
    depth: int
    heads: int
    hidden: int = None  # type: ignore[assignment]  # filled in below, an int from then on
    windows: Sequence[int | None] | None = None
    rotaries: Sequence[Rotary | float | None] | None = None
    mixers: Sequence[str] | None = None
    mlp_bias: bool = False
    tied: bool = True
    compute_dtype: str | None = None
    mlp_chunk: int | None = None
    published: Published | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        hold_numbers(self, ("vocab", "dim", "depth", "heads", "kv_heads", "head_dim", "hidden", "mlp_chunk"))
        hold_numbers(self, ("rotary_base", "eps", "softcap", "dropout_rate"))
        check_sizes(vocab=self.vocab, dim=self.dim)
        check_sizes(DEEPEST, depth=self.depth)
        check_flags(tied=self.tied, mlp_bias=self.mlp_bias)
        if not isinstance(self.published, Published | None):
            raise ValueError(f"published must be a Published or None, got {in_words(self.published)}")
        if self.compute_dtype is not None:
            check_dtype("compute_dtype", self.compute_dtype)
        if self.mlp_chunk is not None:
            check_chunk("mlp_chunk", self.mlp_chunk)
        hidden = hidden_size(self.dim) if self.hidden is None else self.hidden
        check_sizes(hidden=hidden)
        masks = layer_masks(self.mask, self.windows, self.depth)
        kv_heads, head_dim = head_sizes(self.dim, self.heads, self.kv_heads, self.head_dim)
        rotary = rotary_of(self.rotary, self.rotary_base)
        filled = {
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "hidden": hidden,
            "windows": None if self.windows is None else tuple(x if x is None else x.__index__() for x in self.windows),
            "rotary": rotary,
            "rotary_base": rotary and rotary.base,
            "rotaries": layer_rotaries(self.rotaries, self.depth),
        }
        for_layers = {"windows": filled["windows"], "rotaries": filled["rotaries"]}
        filled["mixers"] = check_mixers(self.mixers, self.depth, self.mask, **for_layers)
        for name, value in filled.items():
            object.__setattr__(self, name, value)
        for mask, layer_rotary in dict.fromkeys(zip(masks, self._layer_rotaries(), strict=True)):
            self._attention(mask, layer_rotary)

    def attention(self, layer: int) -> AttentionConfig:
        """Return the attention config of layer ``layer``, counted from 0, with the mask and rotary embedding of this layer."""
        return self._attention(layer_masks(self.mask, self.windows, self.depth)[layer], self._layer_rotaries()[layer])

    def mixer(self, layer: int) -> AttentionConfig | GatedDeltaNetConfig | Mamba2Config:
        """Return the config of layer ``layer``. Recurrent layers have this model's heads and, for each, ``head_dim`` features; a
        Mamba2 has twice as many, and a GatedDeltaNet has ``kv_heads`` heads of keys."""
        name = "attention" if self.mixers is None else self.mixers[layer]
        if name == "attention":
            return self.attention(layer)
        shared: dict[str, Any] = {x: getattr(self, x) for x in ("dim", "heads", "eps", "param_dtype")}
        if name == "mamba2":
            return Mamba2Config(**shared, head_dim=2 * self.head_dim)
        return GatedDeltaNetConfig(**shared, key_heads=self.kv_heads, key_dim=self.head_dim, value_dim=self.head_dim)

    def _layer_rotaries(self) -> Sequence[Rotary | None]:
        rotaries = layer_rotaries(self.rotaries, self.depth)
        return [self.rotary] * self.depth if rotaries is None else rotaries

    def _attention(self, mask: Band, rotary: Rotary | None) -> AttentionConfig:
        shared: dict[str, Any] = {x.name: getattr(self, x.name) for x in fields(AttentionConfig)}
        return AttentionConfig(**shared | {"mask": mask, "rotary": rotary, "rotary_base": rotary and rotary.base})

    def cost(self) -> ComputeCost:
        """Return the compute of a token besides attention, in visible pairs of a layer, and each mask's share of the layers, for
        :func:`plan_batches`. A pair takes ``4 * heads * head_dim`` FLOPs, a token 2 FLOPs for each weight of a matrix; in
        recurrent layers also 2 for each number of the state, times the products with it."""
        inner, outer = self.heads * self.head_dim, self.kv_heads * self.head_dim
        mixers = [self.mixer(layer) for layer in range(self.depth)]
        masks = Counter(mixer.mask for mixer in mixers if isinstance(mixer, AttentionConfig))
        products = sum(
            2 * self.dim * (inner + outer) if isinstance(mixer, AttentionConfig) else mixer.products for mixer in mixers
        )
        weights = 3 * self.dim * self.hidden + (self.vocab * self.dim + products) / self.depth
        return ComputeCost(weights / (2 * inner), tuple((mask, layers / self.depth) for mask, layers in masks.items()))

    def to_json(self) -> str:
        """Return the config as a JSON object of its fields. Nested dataclasses also have a key ``type``, the class name."""
        return write_record(self)

    @classmethod
    def from_json(cls, text: str) -> TransformerConfig:
        """Read a config from the JSON that ``to_json`` wrote. A missing field gets its default.

        Raise ValueError if ``text`` is not a JSON object, has a key that is not a field, lacks a field without a default, or has
        invalid values.
        """
        return read_record(cls, text)


def hidden_size(dim: int) -> int:
    """Return 8/3 of ``dim`` as a multiple of 64: a gated MLP's three matrices then weigh as much as two of 4 ``dim``."""
    return -(-8 * dim // (3 * 64)) * 64
