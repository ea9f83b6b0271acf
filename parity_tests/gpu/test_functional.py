"""flash_attn's functions of ``functional`` on one GPU, beside FlashAttention-2 itself, of which torch has a build."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ring_attn_core.reference.tolerance import bound, relative_error
from ring_attn_torch import functional

from ..support.functional import Call, drawn_arrays
from ..torch.functional_calls import draw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ARRAYS = "out", "dq", "dk", "dv"
LEFT_OUT = "softcap", "alibi_slopes", "return_attn_probs"
WORST = 4.0
"""FlashAttention-2's largest error, as a share of the bound that holds for ours."""


def on_gpu(name: str, seed: int) -> Call:
    """Return the call drawn for CPUs, in 16 bits with heads of 64, without softcap and ALiBi, which torch's build refuses."""
    call = draw(name, seed)
    dtype = ("bfloat16", "float16")[seed % 2]
    sizes = (*call.sizes[:5], 64)
    arguments = {key: x.cuda() if isinstance(x, Tensor) else x for key, x in call.arguments.items() if key not in LEFT_OUT}
    arrays = drawn_arrays(np.random.default_rng(seed), sizes, dtype)
    return replace(call, arrays=arrays, dtype=dtype, softcap=None, slopes=None, arguments=arguments)


def theirs(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return FlashAttention-2's out of the same arguments."""
    given: dict[str, Any] = call.arguments
    left, right = (None if side < 0 else side for side in given.get("window_size", (-1, -1)))
    ends = given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    longest = [given.get(f"max_seqlen_{x}", length) for x, length in zip("qk", call.lengths, strict=True)]
    options = {"scale": given.get("softmax_scale"), "window_size_left": left, "window_size_right": right}
    return torch.ops.aten._flash_attention_forward(q, k, v, *ends, *longest, 0.0, given.get("causal", False), False, **options)[0]


def results(call: Call, function: Any) -> dict[str, np.ndarray]:
    """Return out, dq, dk and dv. Rows that see nothing, or that nothing sees, are 0: flash_attn leaves some unwritten."""
    packed = call.name == "flash_attn_varlen_func"
    on = lambda x: torch.from_numpy(x).to("cuda", getattr(torch, call.dtype))
    q, k, v, dout = (on(call.arrays[x])[0] if packed else on(call.arrays[x]) for x in ("q", "k", "v", "dout"))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    found = dict(zip(ARRAYS, (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))
    queries, keys = call.visible.any(2), call.visible.any(1)
    seen = {"out": queries, "dq": queries, "dk": keys, "dv": keys}
    whole = {name: (x[None] if packed else x).float().cpu().numpy() for name, x in found.items()}
    return {name: np.where(seen[name][..., None, None], x, 0) for name, x in whole.items()}


@pytest.mark.parametrize("first", range(0, 300, 30))
@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_three_hundred_calls_are_those_of_flash_attention_2(name, first):
    seen: Counter[str] = Counter()
    for seed in range(first, first + 30):
        call = on_gpu(name, seed)
        if call.refused or not call.visible.any():
            seen["refused or empty"] += 1
            continue
        ours = results(call, lambda *qkv, call=call: getattr(functional, name)(*qkv, **call.arguments))
        original = results(call, lambda *qkv, call=call: theirs(call, *qkv))
        call.check(ours)
        exact, plain = call.attention(plain=False), call.attention(plain=True)
        for array, x in original.items():
            most = max(bound(plain[array], exact[array], call.dtype), call.lucky_bound(array, exact))
            assert relative_error(x, exact[array]) <= WORST * most, f"draw {seed}: {array} of the original\n{call.arguments}"
        seen["compared"] += 1
    assert seen["compared"] > 12, seen
