"""tokamax's AttentionTestBase, as its wheel holds it, for our attention."""

from __future__ import annotations

from typing import Any

import jax
from tokamax._src import quantization  # type: ignore[import-not-found]
from tokamax._src.ops.attention import base, test_base  # type: ignore[import-not-found]

from .in_jax import attend


def attention(q: Any, k: Any, v: Any, *, bias: Any = None, mask: Any = None, is_causal: bool = False, **others: Any) -> Any:
    """Take tokamax's arguments: its masks become dense, its positions of queries and keys part of them, batch dims one dim."""
    del others["precision"]  # ours are the precision of the inputs
    q, k, v = (quantization.as_array(x) for x in (q, k, v))
    tokens = others.pop("q_indices", None), others.pop("k_indices", None)
    if isinstance(mask, base.Mask) or any(x is not None for x in tokens):
        within = mask if isinstance(mask, base.Mask) else base.Mask(is_causal=is_causal)
        sizes = (x.shape[-3] if at is None else at for x, at in zip((q, k), tokens, strict=True))
        with jax.ensure_compile_time_eval():  # a mask that jit traces has no values that ours could refuse
            mask, is_causal = within.as_array(*sizes), False
    arguments = {"softcap": others.pop("logits_soft_cap", None)} | others
    if (scale := arguments.pop("logits_scale", base.AUTO)) != base.AUTO:
        arguments["scale"] = scale
    if is_causal:
        arguments["is_causal"] = True
    flat = [x.reshape(-1, *x.shape[-3:]) if x.ndim > 4 else x for x in (q, k, v)]
    out = attend(*flat, bias=bias, mask=mask, **arguments)
    return out.reshape(*q.shape[:-1], out.shape[-1])


class AttentionTest(test_base.AttentionTestBase):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, attention_fn=attention)
