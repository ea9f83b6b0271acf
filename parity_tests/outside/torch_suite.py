"""torch's own samples of attention, as its wheel holds them: ours against torch's, forward and backward, and gradcheck."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.hop_db import sample_inputs_flex_attention

from ring_attn_torch import MultiheadAttention, functional

from .in_torch import LAYOUT, Join, Own, attend, own
from .one import in_place

torch.manual_seed(0)  # the ranks make the same samples
TOLERANCE = {torch.float32: {"atol": 5e-5, "rtol": 5e-6}, torch.float64: {}}
"""Of torch's OpInfo of this function: its samples lie in (-9, 9), so float32 rounds scores of hundreds."""

DTYPES = {"float32": torch.float32, "float64": torch.float64}
SDPA = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
MULTIHEAD = next(info for info in module_db if info.module_cls is nn.MultiheadAttention)
SAMPLES = {
    f"{name}-{number}-{kind}": (ours, theirs, sample)
    for kind, dtype in DTYPES.items()
    for name, ours, theirs, samples in (
        ("sdpa", functional.scaled_dot_product_attention, nn.functional.scaled_dot_product_attention, SDPA.sample_inputs_func),
        ("flex", functional.flex_attention, flex_attention, sample_inputs_flex_attention),
    )
    for number, sample in enumerate(samples(None, "cpu", dtype, True))
}
MODULES = {
    f"{number}-{kind}": sample
    for kind, dtype in DTYPES.items()
    for number, sample in enumerate(MULTIHEAD.module_inputs_func(MULTIHEAD, "cpu", dtype, True, True))
}


@pytest.mark.parametrize("name", SAMPLES)
def test_functional(name: str) -> None:
    ours, theirs, sample = SAMPLES[name]
    qkv, others = (sample.input, *sample.args[:2]), dict(sample.kwargs)
    others |= dict(zip(("score_mod", "block_mask"), sample.args[2:], strict=False))
    call = lambda q, k, v: attend(ours, (q, k, v), -2 % q.ndim, **others)
    assert_close(_gradients(call(*qkv), qkv), _gradients(theirs(*qkv, **others), qkv), **TOLERANCE[qkv[0].dtype])
    if qkv[0].dtype == torch.float64:
        assert torch.autograd.gradcheck(call, qkv, fast_mode=True)


@pytest.mark.parametrize("name", MODULES)
def test_multihead_attention(name: str) -> None:
    """Each rank has a part of the gradients of the weights: their sum is torch's."""
    sample = MODULES[name]
    made, qkv, masks = sample.constructor_input, sample.forward_input.args, dict(sample.forward_input.kwargs)
    theirs = nn.MultiheadAttention(*made.args, **made.kwargs, dtype=qkv[0].dtype)
    ours = MultiheadAttention(*made.args, **made.kwargs, dtype=qkv[0].dtype, layout=LAYOUT)
    ours.load_state_dict(theirs.state_dict())
    queries, keys = len(qkv[0]), len(qkv[1])
    padding = masks.pop("key_padding_mask")
    shards = [Own.apply(x, 0) for x in qkv], None if padding is None else own(padding, 0)
    out = in_place(ours, *shards[0], shards[1], **masks, length=queries, kv_length=keys)[0]
    found = _gradients(Join.apply(out, 0, queries), qkv, ours)
    for grad in found[1 + len(qkv) :]:
        dist.all_reduce(grad)
    assert_close(found, _gradients(theirs(*qkv, padding, **masks)[0], qkv, theirs), **TOLERANCE[out.dtype])


def _gradients(out: Tensor, arrays: Any, module: Any = None) -> list[Tensor]:
    """Return out and the gradients of ``arrays`` and of the weights of a module, in the order of their names."""
    torch.manual_seed(1)
    weights = [weight for _, weight in sorted(module.named_parameters())] if module else []
    return [out, *torch.autograd.grad(out, [*arrays, *weights], torch.randn_like(out))]
