"""A thousand launches of random problems: none hangs, and Hopper's kernels find what the portable ones find.

LAUNCHES=10 compute-sanitizer --tool racecheck python -m pytest parity_tests/gpu/test_launches.py
"""

from __future__ import annotations

import math
import os
import random
from typing import Any

import pytest
import torch

from ring_attn_core import Band, sliding_window
from ring_attn_core.reference.tolerance import relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAUNCHES = int(os.environ.get("LAUNCHES", "1000"))
FEATURES = {
    128: [("extents", "softcap"), ("key_mask", "alibi_slopes", "dropout_seed")],
    64: [("extents", "alibi_slopes", "sinks"), ("softcap", "dropout_seed")],
    96: [("extents", "key_mask", "dropout_seed"), ("softcap", "alibi_slopes")],
}
"""Two sets of features for every head size: each set is some 12 kernels to compile, which takes longer than its launches."""
SAME = 1e-2
"""Relative difference of two results in bfloat16 or float16 below which they are the same."""


@pytest.mark.parametrize("featured", [False, True])
@pytest.mark.parametrize(
    ("dim", "heads", "dtype"), [(128, (4, 1), torch.bfloat16), (64, (4, 4), torch.float16), (96, (2, 2), torch.bfloat16)]
)
def test_random_launches_end_and_agree(dim, heads, dtype, featured, programs):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    dice = random.Random(f"{dim} {featured}")
    torch.manual_seed(dim)
    for _ in range(math.ceil(LAUNCHES / 6)):
        arrays, options = problem(dice, dim, heads, dtype, featured)
        programs(dice.choice([1, 4, 132]))
        ours, portable = (gradients(arrays, backend, options) for backend in ("hopper", "triton"))
        for name, mine, other in zip(("out", "dq", "dk", "dv"), ours, portable, strict=True):
            error = relative_error(mine.float().cpu().numpy(), other.float().cpu().numpy())
            assert error <= SAME, (name, error, [x.shape for x in arrays], options)


def test_a_graph_captures_a_mask_that_no_call_had_before():
    """The numbers of its mask come from the host, which may not copy to a stream that is being captured."""
    from ring_attn_torch import ring_attention

    q = torch.randn(1, 512, 4, 64, device="cuda", dtype=torch.bfloat16)
    attend = lambda window: ring_attention(q, q, q, mask=sliding_window(window))
    with torch.no_grad():
        attend(100)  # loads the kernels
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = attend(101)
        graph.replay()
        assert torch.equal(out, attend(101))


def problem(
    dice: random.Random, dim: int, heads: tuple[int, int], dtype: torch.dtype, featured: bool
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k, v and the cotangent of out, of odd lengths, and a mask: often causal, else any band; some tokens are padding.

    ``featured``: with features too; extents in any order, or those of documents.
    """
    batch, s, t = dice.randint(1, 3), dice.randrange(1, 1400, 2), dice.randrange(1, 1400, 2)
    make = lambda tokens, h: torch.randn(batch, tokens, h, dim, device="cuda").to(dtype)
    side = lambda: dice.choice([None, dice.randint(-t, s)])
    mask = dice.choice([Band(0, None), Band(side(), side())])
    options: dict[str, Any] = {"mask": mask, "length": dice.randint((s + 1) // 2, s), "kv_length": dice.randint((t + 1) // 2, t)}
    if featured:
        end = options["kv_length"]
        ends = torch.randint(0, end + 1, (batch, s, 2), device="cuda", dtype=torch.int32).sort(-1).values
        firsts = torch.randint(0, end + 1, (batch, s), device="cuda", dtype=torch.int32).sort(-1).values
        documents = torch.stack([firsts, (firsts + dice.randint(0, 300)).clamp(max=end)], -1)
        some: dict[str, Any] = {
            "extents": dice.choice([ends, documents]),
            "key_mask": torch.rand(batch, t, device="cuda") < dice.random(),
            "softcap": dice.choice([1.0, 20.0]),
            "alibi_slopes": torch.rand(heads[0], device="cuda") / 50,
            "sinks": torch.randn(heads[0], device="cuda"),
            "dropout_seed": dice.randint(0, 99),
        }
        options |= {name: some[name] for name in dice.choice(FEATURES[dim])} | {"dropout_rate": 0.2}
        if "dropout_seed" not in options:
            del options["dropout_rate"]
    return [make(s, heads[0]), make(t, heads[1]), make(t, heads[1]), make(s, heads[0])], options


def gradients(arrays: list[torch.Tensor], backend: str, options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    from ring_attn_torch import ring_attention

    *leaves, dout = (x.detach() for x in arrays)
    leaves = [x.requires_grad_() for x in leaves]
    out = ring_attention(*leaves, backend=backend, layout="contiguous", **options)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)
