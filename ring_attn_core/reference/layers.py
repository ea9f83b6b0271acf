"""Reference layers in numpy, forward and backward, in float64 or rounded as a single device rounds in a dtype.

    layer        out = o(attention(rotary(q x), rotary(k x), v x)); o, q, k, v are y = x W^T
    transformer  x = embed[ids]; x += layer(norm x), x += down(silu(gate(norm x)) * up(norm x)) for every block;
                 logits = (norm x) embed^T; loss = mean of -log softmax(logits)[label]

Arrays are global, in the natural order of tokens; weights have the names that ``to_numpy`` of both packages uses. With a dtype,
the weights and x are rounded to it, and so is the result of each linear layer, norm, rotary embedding and activation. Attention
rounds like ``plain`` of ``oracle.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..runs import Band
from .oracle import Attention, Features, exact, plain, rounding

Array = np.ndarray
Arrays = dict[str, Array]

EPS = 1e-6


class LayerSettings(NamedTuple):
    """Settings that cannot be read from the weights: head dim, mask, and rotary base (None: no rotary embedding)."""

    head_dim: int
    mask: Band
    rotary_base: float | None = 10000.0


class Layers:
    """Layers that compute in ``dtype`` (None: in at least float64). ``features``: options of the attention, except sinks."""

    def __init__(self, sizes: LayerSettings, dtype: str | None = None, features: Features = Features()) -> None:
        self.sizes, self.dtype, self.features = sizes, dtype, features
        self.working: Any = np.float64 if dtype in (None, "float64") else np.float32
        self.rounded = rounding(dtype or "float64")

    def layer(self, weights: Mapping[str, Array], x: Array, dout: Array) -> Arrays:
        """Return ``out``, ``dx`` and each weight's gradient, "d" + its name. ``x``, ``dout``: [batch, tokens, dim]."""
        weights, x, dout = self._cast(weights), self._of(x), self._of(dout)
        out = self._attention(weights, "", x)
        dx, gradients = self._attention_backward(weights, "", x, dout)
        return {"out": out, "dx": dx} | {"d" + name: gradient for name, gradient in gradients.items()}

    def transformer(self, weights: Mapping[str, Array], ids: Array, labels: Array) -> Arrays:
        """Return the logits [batch, tokens, vocab], the mean loss over labels >= 0, and each weight's gradient, "d" + its name.
        ``ids``, ``labels``: int [batch, tokens]."""
        weights = self._cast(weights)
        depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
        embed, entered, x = weights["embed.weight"], [], weights["embed.weight"][ids]
        for at in (f"blocks.{i}." for i in range(depth)):
            middle = x + self._attention(weights, at + "attention.", self._norm(x, weights[at + "attention_norm.weight"]))
            entered.append((at, x, middle))
            x = middle + self._mlp(weights, at + "mlp.", self._norm(middle, weights[at + "mlp_norm.weight"]))
        last = self._norm(x, weights["norm.weight"])
        logits = self._linear(last, embed)
        shifted = logits - logits.max(-1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        counted = labels >= 0
        picked = np.eye(embed.shape[0], dtype=self.working)[np.where(counted, labels, 0)]
        weight = counted[..., None] / self.working(max(counted.sum(), 1))
        gradients = {name: np.zeros_like(w) for name, w in weights.items()}
        dlast, dhead = self._linear_backward(last, embed, self.rounded((np.exp(log_p) - picked) * weight))
        dx, gradients["norm.weight"] = self._norm_backward(x, weights["norm.weight"], dlast)
        for at, before, middle in reversed(entered):
            d, mlp_gradients = self._mlp_backward(weights, at + "mlp.", self._norm(middle, weights[at + "mlp_norm.weight"]), dx)
            d, gradients[at + "mlp_norm.weight"] = self._norm_backward(middle, weights[at + "mlp_norm.weight"], d)
            dx = dx + d
            normed = self._norm(before, weights[at + "attention_norm.weight"])
            d, attention_gradients = self._attention_backward(weights, at + "attention.", normed, dx)
            d, gradients[at + "attention_norm.weight"] = self._norm_backward(before, weights[at + "attention_norm.weight"], d)
            dx = dx + d
            gradients |= mlp_gradients | attention_gradients
        np.add.at(gradients["embed.weight"], ids, dx)
        gradients["embed.weight"] += dhead
        loss = -(log_p * picked * weight).sum()
        return {"logits": logits, "loss": np.array(loss)} | {"d" + name: gradient for name, gradient in gradients.items()}

    def _attention(self, weights: Arrays, at: str, x: Array) -> Array:
        out = self._flat(self._inner(weights, at, x, None).out)
        return self._linear(out, weights[at + "o.weight"])

    def _attention_backward(self, weights: Arrays, at: str, x: Array, dout: Array) -> tuple[Array, Arrays]:
        inner = self._inner(weights, at, x, self._heads(self.rounded(dout @ weights[at + "o.weight"])))
        _, o_gradients = self._linear_backward(self._flat(inner.out), weights[at + "o.weight"], dout)
        gradients, dx = {at + "o.weight": o_gradients}, np.zeros_like(x)
        turned = {"q": self._turned(inner.dq, -1), "k": self._turned(inner.dk, -1), "v": inner.dv}
        for name, gradient in turned.items():
            part, gradients[f"{at}{name}.weight"] = self._linear_backward(x, weights[f"{at}{name}.weight"], self._flat(gradient))
            dx = dx + part
        return dx, gradients if inner.dsinks is None else gradients | {at + "sinks": inner.dsinks}

    def _inner(self, weights: Arrays, at: str, x: Array, dout: Array | None) -> Attention:
        """Return attention before the output projection, with gradients. ``dout``: None for 0. ``at``: prefix of names."""
        q, k, v = (self._heads(self._linear(x, weights[f"{at}{name}.weight"])) for name in "qkv")
        features = self.features._replace(sinks=weights.get(at + "sinks"))._asdict()
        arguments = self._turned(q), self._turned(k), v, self.sizes.mask, np.zeros_like(q) if dout is None else dout
        return exact(*arguments, **features) if self.dtype is None else plain(*arguments, self.dtype, **features)

    def _mlp(self, weights: Arrays, at: str, x: Array) -> Array:
        gate, up = (self._linear(x, weights[f"{at}{name}.weight"]) for name in ("gate", "up"))
        return self._linear(self.rounded(gate / (1 + np.exp(-gate)) * up), weights[at + "down.weight"])

    def _mlp_backward(self, weights: Arrays, at: str, x: Array, dout: Array) -> tuple[Array, Arrays]:
        gate, up = (self._linear(x, weights[f"{at}{name}.weight"]) for name in ("gate", "up"))
        chance = 1 / (1 + np.exp(-gate))
        inside, d_down = self._linear_backward(self.rounded(gate * chance * up), weights[at + "down.weight"], dout)
        dgate, d_gate = self._linear_backward(
            x, weights[at + "gate.weight"], self.rounded(inside * up * chance * (1 + gate * (1 - chance)))
        )
        dup, d_up = self._linear_backward(x, weights[at + "up.weight"], self.rounded(inside * gate * chance))
        return dgate + dup, {at + "down.weight": d_down, at + "gate.weight": d_gate, at + "up.weight": d_up}

    def _norm(self, x: Array, weight: Array) -> Array:
        return self.rounded(x / np.sqrt((x * x).mean(-1, keepdims=True) + self.working(EPS)) * weight)

    def _norm_backward(self, x: Array, weight: Array, dout: Array) -> tuple[Array, Array]:
        size = np.sqrt((x * x).mean(-1, keepdims=True) + self.working(EPS))
        unit, d = x / size, dout * weight
        dx = (d - unit * (d * unit).mean(-1, keepdims=True)) / size
        return self.rounded(dx), (dout * unit).sum((0, 1))

    def _linear(self, x: Array, weight: Array) -> Array:
        return self.rounded(x @ weight.T)

    def _linear_backward(self, x: Array, weight: Array, dout: Array) -> tuple[Array, Array]:
        return self.rounded(dout @ weight), self.rounded(np.tensordot(dout, x, ((0, 1), (0, 1))))

    def _turned(self, x: Array, sign: int = 1) -> Array:
        """Apply the rotary embedding to x [batch, tokens, heads, head_dim], or with sign -1 its inverse, in float64 angles."""
        if self.sizes.rotary_base is None:
            return x
        half = x.shape[-1] // 2
        angles = sign * np.arange(x.shape[1])[:, None, None] * self.sizes.rotary_base ** (-np.arange(half) / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return self.rounded(np.concatenate([turned.real, turned.imag], -1).astype(self.working))

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self.sizes.head_dim)

    def _flat(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1)

    def _cast(self, weights: Mapping[str, Array]) -> Arrays:
        """Return the weights rounded to ``dtype``, except sinks, which are only cast to float32 or float64."""
        return {name: x.astype(self.working) if name.endswith("sinks") else self._of(x) for name, x in weights.items()}

    def _of(self, x: Array) -> Array:
        return self.rounded(x.astype(self.working))
