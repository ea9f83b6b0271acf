"""The ops with each optional array present and absent: opcheck, and torch.compile without another bit."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch.library import opcheck

from ring_attn_core.problem.options import Options
from ring_attn_torch import ring_attention
from ring_attn_torch.call import autograd
from ring_attn_torch.call.prepare import Arrays

from ..support.selection import one_of_each


def leaves(dtype=torch.float32):
    torch.manual_seed(0)
    make = lambda h, d: torch.randn(2, 33, h, d, dtype=dtype, requires_grad=True)
    return make(4, 8), make(2, 8), make(2, 5)


def arguments(passed: Collection[str], *runs: int):
    """Return the arguments of the ops besides differentiated tensors, with the optional arrays that are ``passed``."""
    arrays = Arrays(
        torch.tensor([[0, 20], [3, 33], [5, 5]], dtype=torch.int32).repeat(2, 11, 1),
        torch.arange(66).reshape(2, 33) % 5 != 0,
        torch.randn(4, requires_grad=not runs),
        torch.rand(4),
        torch.tensor([7, 0, 0, 0]),
        torch.tensor([[0, 33], [9, 30], [5, 5]], dtype=torch.int32).repeat(2, 11, 1),
    )
    assert not [name for name, x in arrays._asdict().items() if x is None], "a new optional array belongs into these tests"
    arrays = Arrays(**{name: getattr(arrays, name) for name in passed})
    options = Options(
        layout="contiguous", softcap=2.0 if passed else None, dropout_rate=0.0 if arrays.dropout_seed is None else 0.25
    )
    return [*runs, *options.counts], autograd.OpCall(options).text, *arrays


PASSED = {"none": (), "all": Arrays._fields} | {name: (name,) for name in Arrays._fields}
"""The optional arrays of a call: none, all, and each alone."""


# opcheck itself looks at the .grad of what it clones, and torch 2.15 warns of that.
opcheck_looks_at_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.mark.slow
@opcheck_looks_at_grad
@pytest.mark.parametrize("passed", one_of_each(3, ((each,) for each in PASSED.values())), ids=PASSED)
def test_opcheck_accepts_the_forward_op(passed):
    opcheck(torch.ops.ring_attn.forward.default, (*leaves(), *arguments(passed)))


@opcheck_looks_at_grad
def test_opcheck_accepts_16_bit_inputs_which_have_no_rest():
    opcheck(torch.ops.ring_attn.forward.default, (*leaves(torch.bfloat16), *arguments(())))
    opcheck(torch.ops.ring_attn.attend_block.default, (*leaves(torch.bfloat16), *arguments((), 30, 33, 20, 32, 2)))


@pytest.mark.parametrize("passed", one_of_each(3, ((each,) for each in PASSED.values())), ids=PASSED)
def test_opcheck_accepts_the_backward_op(passed):
    q, k, v = (x.detach() for x in leaves())
    others = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments(passed)]
    total = torch.ops.ring_attn.forward(q, k, v, *others)
    cotangents = torch.randn_like(total[0]), torch.randn_like(total[1])
    opcheck(torch.ops.ring_attn.backward.default, (cotangents, (q, k, v, *total), *others))


@opcheck_looks_at_grad
@pytest.mark.parametrize("passed", [(), set(Arrays._fields) - {"sinks"}], ids=["none", "all"])
def test_opcheck_accepts_the_ops_of_a_block(passed):
    q, k, v = (x.detach() for x in leaves())
    others = arguments(passed, 30, 33, 20, 32, 2)
    opcheck(torch.ops.ring_attn.attend_block.default, (*leaves(), *others))
    total = torch.ops.ring_attn.attend_block(q, k, v, *others)
    cotangents = torch.randn_like(total[0]), torch.randn_like(total[1])
    opcheck(torch.ops.ring_attn.attend_block_backward.default, (cotangents, (q, k, v, *total), *others))


@pytest.mark.parametrize(
    "passed",
    [pytest.param(x, id=name, marks=() if name in ("all", "key_mask") else pytest.mark.exhaustive) for name, x in PASSED.items()],
)
def test_compile_makes_one_graph_with_any_optional_array_and_changes_no_bit(passed):
    arrays = Arrays(*arguments(passed)[2:])
    features = {name: x for name, x in arrays._asdict().items() if x is not None and name != "dropout_seed"}
    features |= {"dropout_rate": 0.25, "dropout_seed": 7} if arrays.dropout_seed is not None else {}
    inputs = [*leaves(), *([] if arrays.sinks is None else [arrays.sinks])]
    cotangents = torch.randn(2, 33, 4, 5), torch.randn(2, 33, 4)
    results = []
    for call in (ring_attention, torch.compile(ring_attention, fullgraph=True, backend="aot_eager")):
        out, lse = call(*inputs[:3], layout="contiguous", return_lse=True, **features)
        cotangent = cotangents[0], cotangents[1].masked_fill(lse.isinf(), 0)
        results.append([out, lse, *torch.autograd.grad((out, lse), inputs, cotangent)])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize(("shape", "order"), [((1, 2, 6, 8), (0, 2, 1, 3)), ((1, 2, 8, 6), (0, 3, 1, 2))], ids=["bhsd", "bhds"])
def test_opcheck_accepts_transposed_views(shape, order):
    views = [torch.randn(shape).permute(order) for _ in range(3)]
    opcheck(torch.ops.ring_attn.forward.default, (*views, *arguments(())))
    total = torch.ops.ring_attn.forward(*views, *arguments(()))
    opcheck(torch.ops.ring_attn.backward.default, (total[:2], (*views, *total), *arguments(())))
