"""Random calls of DilatedAttention: drawn, computed densely from their definition, and over a ring."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ring_attn_core.reference.dilated import DilatedFeatures, patterns
from ring_attn_torch import DilatedAttention

from .multihead import Draw, Group, Tensors, computed, draw, gradients_of, leaves, weights_of

PATTERNS: list[dict[str, Any]] = [
    {"segments": (3, 8), "dilations": (1, 2)},
    {"segments": (4, 30), "dilations": (2, 3)},
    {"segments": (5, 12, 40), "dilations": (1, 4, 5)},
    {"segments": (6,), "dilations": (2,)},
    {"segments": (4, 30), "dilations": (1, 3), "mixing": "heads"},
]
WHOLE: dict[str, Any] = {"segments": (64,), "dilations": (1,)}
"""One segment that covers every sequence that is drawn: all tokens attend to all."""


@dataclass
class DilatedDraw(Draw):
    """A call of DilatedAttention, of these patterns."""

    patterns: dict[str, Any] = field(default_factory=dict)


def draw_dilated(seed: int, of: Sequence[dict[str, Any]]) -> DilatedDraw | None:
    """One of the calls of ``multihead.draw``, on contiguous shards and without dropout; None where it is of two lengths."""
    drawn, rng = draw(seed), random.Random(seed)
    if drawn.query.shape[drawn.dim] != drawn.key.shape[drawn.dim]:
        return None
    fitting = [each for each in of if each.get("mixing") != "heads" or len(each["segments"]) <= drawn.made["num_heads"]]
    lengths = {name: length for name, length in drawn.lengths.items() if name == "length"}
    drawn = replace(drawn, made=drawn.made | {"dropout": 0.0}, layout="contiguous", lengths=lengths)
    return DilatedDraw(**drawn.__dict__, patterns=rng.choice(fitting))


def dilated_over_a_ring(group: Group, draws: list[DilatedDraw]) -> list[Tensors | str]:
    """Return for each draw out and all gradients gathered in natural order, or the words in which it is refused."""
    return [computed(group, drawn, partial(DilatedAttention, group=group, **drawn.patterns)) for drawn in draws]


def densely(drawn: DilatedDraw) -> Tensors:
    """out and all gradients with torch's weights, from the definition: key j counts ``n_ij`` times for query i of a head."""
    module, inputs = drawn.module(), leaves(drawn.query, drawn.key, drawn.value)
    rows = [x[None] if x.ndim == 2 else x if drawn.made["batch_first"] else x.transpose(0, 1) for x in inputs]
    separate = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    weights = separate if module.in_proj_weight is None else module.in_proj_weight.chunk(3)
    biases = [0, 0, 0] if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    by_head = lambda x: x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)  # [b h s d]
    q, k, v = (by_head(x @ w.T + bias) for x, w, bias in zip(rows, weights, biases, strict=True))
    counts = _counts(drawn, q.shape)
    if module.bias_k is not None:
        k, v = (torch.cat([x, by_head(b).expand(len(x), -1, -1, -1)], 2) for x, b in ((k, module.bias_k), (v, module.bias_v)))
        counts = torch.nn.functional.pad(counts, (0, 1), value=1.0)
    if module.add_zero_attn:
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        counts = torch.nn.functional.pad(counts, (0, 1), value=1.0)
    z = counts * (q @ k.mT * q.shape[-1] ** -0.5).exp()
    attended = z / z.sum(-1, keepdim=True).clamp(min=1e-300) @ v
    out = module.out_proj(attended.transpose(1, 2).flatten(2))
    out = out[0] if drawn.query.ndim == 2 else out if drawn.made["batch_first"] else out.transpose(0, 1)
    out.backward(drawn.cotangent())
    return {"out": out.detach(), **gradients_of(inputs), **weights_of(module)}


def _counts(drawn: DilatedDraw, shape: Sequence[int]) -> Tensor:
    """[b h s s]: how often a query counts a key, by patterns and masks."""
    b, h, s, _ = shape
    of_patterns = patterns(DilatedFeatures(**drawn.patterns), h, np.arange(s), np.arange(s))
    counts = torch.from_numpy(of_patterns.sum(0)).double().expand(b, -1, -1, -1)
    allows = lambda mask: ~mask if mask.dtype == torch.bool else mask == 0
    if (mask := drawn.called.get("attn_mask")) is not None:
        counts = counts * (allows(mask) if mask.ndim == 2 else allows(mask).unflatten(0, (b, h)))
    if (padding := drawn.called.get("key_padding_mask")) is not None:
        counts = counts * allows(padding).reshape(b, 1, 1, s)
    return counts
