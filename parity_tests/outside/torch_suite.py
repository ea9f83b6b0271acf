"""torch's own samples of attention, as its wheel holds them: ours against torch's, forward and backward, and gradcheck."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
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
from torch.utils._pytree import tree_map

from ring_attn_torch import MultiheadAttention, functional

from .in_torch import LAYOUT, Join, Own, attend, own
from .one import in_place

torch.manual_seed(0)  # the ranks make the same samples
TOLERANCE = {torch.float32: {"atol": 5e-5, "rtol": 5e-6}, torch.float64: {}}
"""The tolerance of torch's OpInfo of this function: its samples lie in (-9, 9), so float32 rounds scores of hundreds."""

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


DRAWS = 20
LARGEST = 2.5  # of rounding()
Case = Callable[[int], tuple[list[Tensor], Callable[[torch.dtype], list[Tensor]]]]
"""A function of a seed. It returns our result and gradients, and the function that computes torch's in a dtype."""


@pytest.mark.parametrize("name", SAMPLES)
def test_functional(name: str) -> None:
    judge(partial(functional_case, name))


@pytest.mark.parametrize("name", MODULES)
def test_multihead_attention(name: str) -> None:
    judge(partial(module_case, name))


def judge(case: Case) -> None:
    """Compare ours with torch's at torch's tolerance. A difference beyond the default one of assert_close must be rounding."""
    mine, theirs = case(0)
    dtype = mine[0].dtype
    expected = theirs(dtype)
    assert_close(mine, expected, **TOLERANCE[dtype])
    if any(not torch.allclose(x, y, rtol=1.3e-6, atol=1e-5) for x, y in zip(mine, expected, strict=True)):
        assert rounding(case) < LARGEST


def rounding(case: Case) -> float:
    """Return our error in float32 over torch's, each a root of mean squares, over draws of weights and cotangents."""
    ours = torchs = 0.0
    for seed in range(DRAWS):
        mine, theirs = case(seed)
        exact = theirs(torch.float64)
        ours += _squares(mine, exact)
        torchs += _squares(theirs(torch.float32), exact)
    return (ours / torchs) ** 0.5


def functional_case(name: str, seed: int) -> tuple[list[Tensor], Any]:
    ours, function, sample = SAMPLES[name]
    qkv, others = (sample.input, *sample.args[:2]), dict(sample.kwargs)
    others |= dict(zip(("score_mod", "block_mask"), sample.args[2:], strict=False))
    call = lambda q, k, v: attend(ours, (q, k, v), -2 % q.ndim, **others)

    def theirs(dtype: torch.dtype) -> list[Tensor]:
        arrays, arguments = _cast((qkv, others), dtype)
        return _gradients(function(*arrays, **arguments), arrays, seed)

    found = _gradients(call(*qkv), qkv, seed)
    if qkv[0].dtype == torch.float64:
        assert torch.autograd.gradcheck(call, qkv, fast_mode=True)
    return found, theirs


def module_case(name: str, seed: int) -> tuple[list[Tensor], Any]:
    """Each rank has a part of the gradients of our weights: their sum is torch's."""
    torch.manual_seed(seed)
    sample = MODULES[name]
    made, qkv, masks = sample.constructor_input, sample.forward_input.args, dict(sample.forward_input.kwargs)
    module = nn.MultiheadAttention(*made.args, **made.kwargs, dtype=qkv[0].dtype)
    ours = MultiheadAttention(*made.args, **made.kwargs, dtype=qkv[0].dtype, layout=LAYOUT)
    ours.load_state_dict(module.state_dict())
    queries, keys = len(qkv[0]), len(qkv[1])
    padding = masks.pop("key_padding_mask")

    def theirs(dtype: torch.dtype) -> list[Tensor]:
        cast = deepcopy(module).to(dtype)
        arrays, mask, arguments = _cast((qkv, padding, masks), dtype)
        return _gradients(cast(*arrays, mask, **arguments)[0], arrays, seed, cast)

    shards = [Own.apply(x, 0) for x in qkv], None if padding is None else own(padding, 0)
    out = in_place(ours, *shards[0], shards[1], **masks, length=queries, kv_length=keys)[0]
    found = _gradients(Join.apply(out, 0, queries), qkv, seed, ours)
    for grad in found[1 + len(qkv) :]:
        dist.all_reduce(grad)
    return found, theirs


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    floats = lambda x: isinstance(x, Tensor) and x.is_floating_point()
    return tree_map(lambda x: x.detach().to(dtype).requires_grad_(x.requires_grad) if floats(x) else x, tree)


def _squares(found: list[Tensor], exact: list[Tensor]) -> float:
    return sum(float((x.detach() - y.detach()).square().sum()) for x, y in zip(found, exact, strict=True))


def _gradients(out: Tensor, arrays: Any, seed: int, module: Any = None) -> list[Tensor]:
    """Return out and the gradients of ``arrays`` and of the weights of a module, in the order of their names."""
    torch.manual_seed(seed + 1)
    weights = [weight for _, weight in sorted(module.named_parameters())] if module else []
    return [out, *torch.autograd.grad(out, [*arrays, *weights], torch.randn(out.shape).to(out.dtype))]
