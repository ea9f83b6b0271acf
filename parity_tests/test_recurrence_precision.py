"""Recurrences on a ring compute in full precision, also under autocast, and never wait for a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ring_attn_torch
from ring_attn_torch.recurrence import delta_rule, fla

from .support.recurrences import DOCUMENTS, LENGTH, SEQUENTIAL, call, ids_of, make, relative

IDS = ids_of(DOCUMENTS)


def shards_of(group: Any, rule: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, Any]]:
    """Return a rank's arrays and cotangent, and the other arguments of a call on packed documents in zigzag."""
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    problem, shard = make(rule, True), lambda x: ring_attn_torch.to_layout(x, "zigzag", ranks).chunk(ranks, 1)[rank]
    arrays = [shard(x) if i < problem.sharded else x for i, x in enumerate(problem.rounded(dtype))]
    where = {"group": group, "length": LENGTH, "extents": shard(ring_attn_torch.document_extents(IDS))}
    return arrays, shard(problem.cotangent(problem.shape)).to(dtype), where


@pytest.mark.parametrize("rule", SEQUENTIAL)
def test_autocast_changes_no_bit_of_forward_and_backward(gloo, rule):
    assert all(gloo(2, under_autocast, rule))


def under_autocast(group: Any, rule: str) -> bool:
    arrays, cotangent, where = shards_of(group, rule, torch.float32)
    results = []
    for on in (False, True):
        leaves = [x.clone().requires_grad_() for x in arrays]
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            out = call(ring_attn_torch, rule, leaves, **where)
            results.append([out, *torch.autograd.grad((out * cotangent).sum(), leaves)])
    return all(torch.equal(plain, under_autocast) for plain, under_autocast in zip(*results, strict=True))


@pytest.mark.parametrize("rule", SEQUENTIAL)
def test_a_later_call_reads_nothing_of_the_host_and_of_the_device(gloo, rule):
    for waits in gloo(2, waited, rule):
        assert waits == []


def waited(group: Any, rule: str) -> list[str]:
    """Return the ops of a second call, forward and backward, for which a GPU would stop: host data, sizes that depend on data."""
    arrays, _, where = shards_of(group, rule, torch.float32)
    seen: list[str] = []

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op.overloadpacket in (torch.ops.aten.lift_fresh, torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense):
                seen.append(str(op))
            return op(*args, **(kwargs or {}))

    for mode in (nullcontext(), Waits()):
        with mode:
            call(ring_attn_torch, rule, [x.clone().requires_grad_() for x in arrays], **where).square().sum().backward()
    return seen


@pytest.mark.parametrize(("rule", "documents"), [("gdn", True), ("kda", False)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_ring_of_kernels_that_compute_a_run_is_one_device(gloo, ranks, rule, documents):
    for errors in gloo(ranks, by_kernels, rule, documents):
        assert max(errors) < 1e-13


def by_kernels(group: Any, rule: str, documents: bool) -> list[float]:
    """Return the errors of a rank with ``token_by_token`` in place of the kernels of flash-linear-attention."""
    by_fla = lambda package, _, arrays, **where: package.gated_delta_rule(*arrays, backend="fla", **where)
    with patch.object(delta_rule, "check_fla", lambda *_: None), patch.object(fla, "kernel", lambda dims: token_by_token):
        return on_rank(group, rule, documents, by_fla)


def on_rank(group: Any, rule: str, documents: bool, compute: Any) -> list[float]:
    """Return the relative errors of a rank's result and gradients; those of whole arrays are summed over the ranks."""
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    problem = make(rule, documents)
    shard = lambda x: ring_attn_torch.to_layout(x, "zigzag", ranks).chunk(ranks, 1)[rank]
    leaves = [(shard(x) if i < problem.sharded else x).clone().requires_grad_() for i, x in enumerate(problem.arrays)]
    extents = shard(ring_attn_torch.document_extents(IDS)) if documents else None
    out = compute(ring_attn_torch, rule, leaves, group=group, length=LENGTH, extents=extents)
    gradients = torch.autograd.grad((out * shard(problem.cotangent(problem.shape))).sum(), leaves)
    found, expected = [out.detach(), *gradients], [torch.from_numpy(x) for x in problem.reference()]
    errors = []
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if i <= problem.sharded:
            errors.append(relative(a, shard(b).numpy()))
        else:
            if ranks > 1:
                torch.distributed.all_reduce(a, group=group)
            errors.append(relative(a, b.numpy()))
    return errors


def token_by_token(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, initial_state: Any, output_final_state: bool) -> Any:
    """Compute what ``fla.ops.gated_delta_rule.chunk_gated_delta_rule`` does."""
    state, out = initial_state, []
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]) if state is None else state
    for t in range(q.shape[1]):
        decay = g[:, t].exp()
        state = state * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
        written = (v[:, t] - (state * k[:, t, ..., None]).sum(-2)) * beta[:, t, :, None]
        state = state + k[:, t, ..., None] * written[..., None, :]
        out.append(scale * (state * q[:, t, ..., None]).sum(-2))
    return torch.stack(out, 1), state if output_final_state else None


def problem_of_jax(rule: str) -> tuple[Any, Any]:
    """Return the function of JAX that computes a problem's result and gradients on a ring of two, and its arguments."""
    import jax
    from jax.sharding import PartitionSpec

    import ring_attn_jax

    from .jax.ring import mesh_of

    to_jax = lambda x: jax.numpy.asarray(x.double().numpy()).astype(str(x.dtype)[6:])
    problem, ranks, kind = make(rule, True), 2, torch.bfloat16
    shard = lambda x: ring_attn_jax.to_layout(to_jax(x), "zigzag", ranks)
    arrays = [shard(x) if i < problem.sharded else to_jax(x) for i, x in enumerate(problem.rounded(kind))]
    extents = [shard(ring_attn_torch.document_extents(IDS))]
    over_tokens = PartitionSpec(None, "seq")
    specs = [over_tokens if i < problem.sharded else PartitionSpec() for i in range(len(arrays))]

    def on_ring(*arrays: Any) -> Any:
        arrays, extents = arrays[: len(specs)], arrays[len(specs) :]
        return call(ring_attn_jax, rule, arrays, length=LENGTH, extents=extents[0])

    ring = jax.shard_map(on_ring, mesh=mesh_of(ranks), in_specs=(*specs, *[over_tokens] * len(extents)), out_specs=over_tokens)

    def results(arrays: Any, cotangent: Any) -> Any:
        out, backward = jax.vjp(lambda *arrays: ring(*arrays, *extents), *arrays)
        return out, *backward(cotangent)

    return results, (arrays, shard(problem.cotangent(problem.shape).to(kind)))


@pytest.mark.parametrize("rule", ["gdn", "kda", "mamba2", "mamba1"])
def test_each_product_of_jax_is_in_full_precision(rule):
    jax = pytest.importorskip("jax")
    results, given = problem_of_jax(rule)
    inside = [jax.make_jaxpr(results)(*given).jaxpr]
    precisions = []
    while inside:
        for step in inside.pop().eqns:
            inside += [getattr(x, "jaxpr", x) for x in jax.tree.leaves(step.params, is_leaf=is_jaxpr) if is_jaxpr(x)]
            if step.primitive.name == "dot_general":
                precisions.append((str(step.params["precision"]), str(step.invars[0].aval.dtype)))
    assert len(precisions) > 3
    assert {dtype for _, dtype in precisions} == {"float32"}
    assert all("HIGHEST" in precision for precision, _ in precisions)


def is_jaxpr(x: Any) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")
