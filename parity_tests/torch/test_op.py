"""The op in the world of PyTorch: opcheck, torch.compile, selective checkpointing, DTensor, second derivatives."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ring_attn_core import causal, sliding_window
from ring_attn_torch import attend_block, ring_attention
from ring_attn_torch.call import autograd

from ..support import spawn
from ..support.cases import Case
from ..support.spawn import PerRank
from .ring import on_rank
from .test_opcheck import leaves


class Seen(TorchDispatchMode):
    """The names of the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("features", [{}, {"softcap": 2.0, "dropout_rate": 0.25, "dropout_seed": 3, "sinks": torch.ones(4)}])
def test_a_call_outside_of_modes_goes_round_the_ops_and_gives_the_same_bits(features):
    q, k, v = leaves()
    cotangent = torch.randn(2, 33, 4, 5)
    with Seen() as seen:
        followed = ring_attention(q, k, v, layout="contiguous", **features)
        of_followed = torch.autograd.grad(followed, (q, k, v), cotangent)
    assert [name for name in seen.names if "ring_attn" in name] == ["ring_attn.forward.default", "ring_attn.backward.default"]
    with patch.object(autograd.OpCall, "read", side_effect=AssertionError("an op was called")):
        plain = ring_attention(q, k, v, layout="contiguous", **features)
        of_plain = torch.autograd.grad(plain, (q, k, v), cotangent)
        with torch.no_grad():
            assert torch.equal(ring_attention(q, k, v, layout="contiguous", **features), plain)
    for a, b in zip((followed, *of_followed), (plain, *of_plain), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("watch", ["the forward only", "the backward only"])
def test_a_mode_around_only_one_pass_sees_the_op_of_that_pass(watch):
    q, k, v = leaves()
    first, second = (Seen(), nullcontext()) if watch == "the forward only" else (nullcontext(), Seen())
    with first:
        out = ring_attention(q, k, v, layout="contiguous")
    with second:
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    (seen,) = (each for each in (first, second) if isinstance(each, Seen))
    expected = "ring_attn.forward.default" if watch == "the forward only" else "ring_attn.backward.default"
    assert [name for name in seen.names if "ring_attn" in name] == [expected]


def test_gradients_pass_gradcheck_in_float64():
    q, k, v = (x.double().detach()[:1, :5].requires_grad_() for x in leaves())
    assert torch.autograd.gradcheck(partial(ring_attention, layout="striped", return_lse=True), (q, k, v))


def test_a_second_derivative_raises_instead_of_being_wrong():
    q, k, v = leaves()
    (gradient,) = torch.autograd.grad(ring_attention(q, k, v, layout="striped").sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.exhaustive
def test_compile_makes_one_graph_of_a_ring_and_changes_no_bit(gloo):
    case = Case(ranks=2)
    eager = gloo(2, on_rank, case, *(PerRank(*x) for x in case.inputs()))
    compiled = gloo(2, compiled_on_rank, case, *(PerRank(*x) for x in case.inputs()))
    for ours, theirs in zip(eager, compiled, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def compiled_on_rank(group, case, *shards):
    compiled = torch.compile(ring_attention, fullgraph=True, backend="aot_eager")
    with patch("parity_tests.torch.ring.ring_attention", compiled):
        return on_rank(group, case, *shards)


@pytest.mark.exhaustive
def test_compile_takes_a_device_mesh_and_the_default_group():
    pool = spawn.Ranks(most=2)  # whose default group has two ranks, which compile in a quarter of the time of eight
    try:
        pool(2, compiled_with_each_kind_of_group)
    finally:
        pool.close()


def compiled_with_each_kind_of_group(world):
    from torch.distributed.device_mesh import init_device_mesh

    compiled = torch.compile(ring_attention, fullgraph=True, backend="aot_eager")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("seq",))
    q = torch.full((1, 2, 1, 4), float(dist.get_rank()))
    first = compiled(q, q, q, group=world)
    for group in (None, mesh):
        assert torch.equal(compiled(q, q, q, group=group), first)


@pytest.mark.slow
@pytest.mark.parametrize("options", [lambda n: {"dropout_rate": 0.3, "dropout_seed": n}, lambda n: {"mask": sliding_window(n)}])
def test_another_number_at_every_call_stays_one_graph(options):
    q, k, v = leaves()
    counter = CompileCounter()
    compiled = torch.compile(lambda n: ring_attention(q, k, v, layout="striped", **options(n)), fullgraph=True, backend=counter)
    for n in (3, 4, 5, 6):
        torch.testing.assert_close(compiled(n), ring_attention(q, k, v, layout="striped", **options(n)))
    assert counter.frame_count <= 2, "once for the first number, once for any"


@pytest.mark.parametrize(("keep", "forwards"), [(True, 1), (False, 2)], ids=["out and lse kept", "everything recomputed"])
def test_selective_checkpointing_runs_one_forward_ring(keep, forwards):
    q, k, v = leaves()
    ring = torch.ops.ring_attn.forward.default

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if keep and op == ring else CheckpointPolicy.PREFER_RECOMPUTE

    block = lambda q, k, v: ring_attention(q.sin(), k.sin(), v.sin(), layout="striped").cos()
    with patch.object(autograd.loop, "forward", wraps=autograd.loop.forward) as spy:
        out = checkpoint(block, q, k, v, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert spy.call_count == forwards
    for mine, plain in zip(gradients, torch.autograd.grad(block(q, k, v).sum(), (q, k, v)), strict=True):
        assert torch.equal(mine, plain)


def test_a_dtensor_is_refused_with_the_remedy(gloo):
    gloo.refuse(r"to_local\(\)", 2, with_dtensor)


def with_dtensor(group):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    q = distribute_tensor(torch.ones(1, 4, 2, 8), mesh, [Shard(1)])
    return ring_attention(q, q, q, group=group)


@pytest.mark.slow
def test_a_mesh_of_two_dimensions_names_the_remedy(gloo):
    errors = gloo.outcomes(8, with_two_dimensions)
    assert all(isinstance(error, NotImplementedError) and 'mesh["name"]' in str(error) for error in errors)


def with_two_dimensions(world):
    from torch.distributed.device_mesh import init_device_mesh

    q = torch.ones(1, 4, 2, 8)
    return ring_attention(q, q, q, group=init_device_mesh("cpu", (2, 4)))


def test_a_rank_outside_the_group_is_told_so(gloo):
    errors = gloo.outcomes(3, from_outside)
    assert errors[:2] == [(1, 4, 2, 8)] * 2
    assert isinstance(errors[2], ValueError) and "not a member" in str(errors[2])


def from_outside(group):
    ring = spawn.groups[2]
    q = torch.ones(1, 4, 2, 8)
    return tuple(ring_attention(q, q, q, group=ring).shape)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, at its first use of these
@pytest.mark.parametrize("shape", [(0, 6, 2, 4), (2, 0, 2, 4)], ids=["no batch", "no tokens"])
@pytest.mark.parametrize("every", [False, True], ids=["plain", "every feature"])
def test_nothing_in_gives_nothing_out(shape, every):
    x = torch.randn(shape, requires_grad=True)
    masks = {"extents": torch.zeros((*shape[:2], 2), dtype=torch.int32), "key_mask": torch.ones(shape[:2], dtype=torch.bool)}
    heads = {"sinks": torch.zeros(2), "alibi_slopes": torch.ones(2)}
    features = {**masks, **heads, "softcap": 2.0, "dropout_rate": 0.1, "dropout_seed": 1} if every else {}
    out = ring_attention(x, x, x, **features)
    assert out.shape == shape
    assert torch.autograd.grad(out.sum(), x)[0].shape == shape


@pytest.mark.exhaustive
def test_inductor_compiles_what_comes_transposed():
    """The usual [b h s d] model hands over views; some keep keys as [b h d s]."""
    orders = (0, 2, 1, 3), (0, 3, 1, 2), (0, 2, 1, 3)
    inputs = [torch.randn((1, 2, 8, 6) if order[1] == 3 else (1, 2, 6, 8), requires_grad=True) for order in orders]
    attention = lambda *qkv: ring_attention(
        *(x.permute(order) for x, order in zip(qkv, orders, strict=True)), layout="striped"
    ).sum()
    gradients = torch.autograd.grad(torch.compile(attention)(*inputs), inputs)
    for mine, plain in zip(gradients, torch.autograd.grad(attention(*inputs), inputs), strict=True):
        torch.testing.assert_close(mine, plain)


def test_autocast_changes_no_bit():
    q, k, v = leaves()
    results = []
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            out = ring_attention(q, k, v, layout="striped")
            results.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
    for plain, under_autocast in zip(*results, strict=True):
        assert torch.equal(plain, under_autocast)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, at its first use of these
# The first jvp of a process makes torch import its rules for it, which it scripts: torch 2.15 deprecates its own way of doing so.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_forward_mode_is_refused_instead_of_dropped():
    x = torch.randn(1, 8, 2, 8)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: ring_attention(q, q, q), (x,), (x,))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda slopes: ring_attention(x, x, x, alibi_slopes=slopes), (torch.zeros(2),), (torch.ones(2),))


@pytest.mark.parametrize("attention", [ring_attention, lambda *qkv: attend_block(*qkv)[0]], ids=["ring", "block"])
def test_functional_gradients_are_refused_by_name(attention):
    x = torch.randn(1, 8, 2, 8)
    total = lambda q: attention(q, x, x).sum()
    many = x[None].expand(2, -1, -1, -1, -1)
    for transformed, argument in (
        (torch.func.grad(total), x),
        (torch.vmap(torch.func.grad(total)), many),
        (torch.func.grad(lambda q: torch.vmap(total)(q).sum()), many),
    ):
        with pytest.raises(NotImplementedError, match="no derivative under"):
            transformed(argument)


def test_nan_that_reaches_a_query_which_sees_nothing_reaches_no_key():
    q, k, v = leaves()
    out, lse = ring_attention(q, k, v, layout="contiguous", mask=causal(offset=-3), return_lse=True)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (out.detach() / (lse[..., None] > -math.inf), lse.detach().square()))
    assert all(gradient.isfinite().all() for gradient in gradients)
