"""Recurrences and convolutions on a ring are those of one device, in both packages, every layout, and with packed documents."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

import ring_attn_torch

from .support.recurrences import DOCUMENTS, LENGTH, SEQUENTIAL, Rows, call, ids_of, make
from .support.selection import first
from .support.spawn import TIMEOUT

PLACES = [("zigzag", True), ("balanced", True), ("contiguous", False), ("zigzag", False), ("contiguous", True)]
"""Layouts, and whether the rows are packed documents."""
IDS = ids_of(DOCUMENTS)


def place(layout: str, ranks: int, rows: Rows = DOCUMENTS) -> Any:
    """Return the layout's name, or the balanced layout of the documents."""
    if layout != "balanced":
        return layout
    ids = ids_of(rows)
    return ring_attn_torch.shard_batch(torch.zeros_like(ids), layout, ranks, 0, documents=ids).layout


def in_place(layout: str, ranks: int) -> tuple[Any, str, dict[str, Any]]:
    """Return where tokens are, the layout of a layer's constructor, and arguments of its call."""
    where = place(layout, ranks)
    return (where, "zigzag", {"layout": where}) if layout == "balanced" else (where, layout, {})


def relative(found: Any, expected: Any) -> float:
    """Return the norm of the error over that of the expected array, or over 0.01 if that is less: a gradient may be 0."""
    return float(np.linalg.norm(np.asarray(found) - expected) / max(np.linalg.norm(expected), 0.01))


def on_rank(group: Any, rule: str, layout: str, documents: bool, rows: Rows = DOCUMENTS, compute: Any = call) -> list[float]:
    """Return the relative errors of a rank's result and gradients; those of whole arrays are summed over the ranks."""
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    problem, where, length = make(rule, documents, rows), place(layout, ranks, rows), sum(rows[0])
    shard = lambda x: ring_attn_torch.to_layout(x, where, ranks).chunk(ranks, 1)[rank]
    leaves = [(shard(x) if i < problem.sharded else x).clone().requires_grad_() for i, x in enumerate(problem.arrays)]
    extents = shard(ring_attn_torch.document_extents(ids_of(rows))) if documents else None
    out = compute(ring_attn_torch, rule, leaves, group=group, layout=where, length=length, extents=extents)
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


@pytest.mark.parametrize("ranks", first([3, 1, 2, 4, 8]))
@pytest.mark.parametrize(("layout", "documents"), first(PLACES, 2))
@pytest.mark.parametrize("rule", SEQUENTIAL)
def test_a_ring_of_pytorch_is_one_device(gloo, rule, layout, documents, ranks):
    for errors in gloo(ranks, on_rank, rule, layout, documents):
        assert max(errors) < 1e-13


@pytest.mark.parametrize("rule", SEQUENTIAL)
def test_a_rank_without_tokens_takes_part_in_the_backward(gloo, rule):
    for errors in gloo(4, on_a_ring_that_ends, rule):
        assert max(errors) < 1e-13


def on_a_ring_that_ends(group: Any, rule: str) -> list[float]:
    """Return the relative errors of 5 tokens over 4 ranks, the last without any. A rank that waits for another fails in 60 s."""
    _set_pg_timeout(timedelta(seconds=60), group)
    try:
        return on_rank(group, rule, "contiguous", False, [[5], [5]])
    finally:
        _set_pg_timeout(TIMEOUT, group)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", first([3, 1, 2, 4, 8]))
@pytest.mark.parametrize(("layout", "documents"), first(PLACES))
@pytest.mark.parametrize("rule", first(["kda", "mamba2", "gdn", "mamba1", "convolution"], 2))
def test_a_ring_of_jax_is_one_device(rule, layout, documents, ranks):
    pytest.importorskip("jax")
    assert max(on_devices(ranks, rule, layout, documents)) < 1e-13


def test_one_device_of_jax_sends_no_state():
    jax = pytest.importorskip("jax")
    import ring_attn_jax

    from .jax.ring import mesh_of

    assert max(on_devices(1, "mamba2", "contiguous", False, [[5], [5]])) < 1e-13
    bias, over = jax.numpy.ones((1, 1, 2, 3, 4)), jax.P(None, "seq")
    carried = lambda bias: ring_attn_jax.carry(bias, decay=bias[..., :1, :1], layout="contiguous")
    assert not jax.shard_map(carried, mesh=mesh_of(1), in_specs=over, out_specs=over)(bias).any()


def on_devices(
    ranks: int, rule: str, layout: str, documents: bool, rows: Rows = DOCUMENTS, dtype: str = "float64"
) -> list[float]:
    """Return the relative errors of the result and the gradients of all devices of JAX, of arrays rounded to ``dtype``."""
    import jax

    with jax.enable_x64(True):
        where = place(layout, ranks, rows)
        problem, results, given = problem_of_jax(ranks, rule, where, documents, rows, dtype)
        shard = lambda x: ring_attn_torch.to_layout(torch.from_numpy(x), where, ranks).numpy()
        expected = enumerate(problem.reference(getattr(torch, dtype)))
        expected = [shard(x) if i <= problem.sharded else x for i, x in expected]
        found = jax.jit(results)(*given)
        return [relative(np.asarray(a).astype(np.float64), b) for a, b in zip(found, expected, strict=True)]


def problem_of_jax(ranks: int, rule: str, where: Any, documents: bool, rows: Rows, dtype: str) -> tuple[Any, Any, Any]:
    """Return a problem, the function of JAX that computes its result and gradients on a ring, and that function's arguments."""
    import jax
    from jax.sharding import AxisType, PartitionSpec

    import ring_attn_jax

    to_jax = lambda x: jax.numpy.asarray(x.double().numpy()).astype(str(x.dtype)[6:])
    problem, length, kind = make(rule, documents, rows), sum(rows[0]), getattr(torch, dtype)
    shard = lambda x: ring_attn_jax.to_layout(to_jax(x), where, ranks)
    arrays = [shard(x) if i < problem.sharded else to_jax(x) for i, x in enumerate(problem.rounded(kind))]
    extents = [shard(ring_attn_torch.document_extents(ids_of(rows)))] if documents else []
    mesh = jax.make_mesh((ranks,), ("seq",), devices=jax.devices()[:ranks], axis_types=(AxisType.Auto,))
    over_tokens = PartitionSpec(None, "seq")
    specs = [over_tokens if i < problem.sharded else PartitionSpec() for i in range(len(arrays))]

    def on_ring(*arrays: Any) -> Any:
        arrays, extents = arrays[: len(specs)], arrays[len(specs) :]
        return call(ring_attn_jax, rule, arrays, layout=where, length=length, extents=extents[0] if extents else None)

    ring = jax.shard_map(on_ring, mesh=mesh, in_specs=(*specs, *[over_tokens] * len(extents)), out_specs=over_tokens)

    def results(arrays: Any, cotangent: Any) -> Any:
        out, backward = jax.vjp(lambda *arrays: ring(*arrays, *extents), *arrays)
        return out, *backward(cotangent)

    return problem, results, (arrays, shard(problem.cotangent(problem.shape).to(kind)))


def test_a_document_changes_no_bit_of_another(gloo):
    assert all(gloo(2, probed))


def probed(group: Any) -> bool:
    """Return whether a changed token of row 0's third document changes that document alone."""
    changed = []
    for rule in SEQUENTIAL:
        problem, results = make(rule, True), []
        for change in (0, 1):
            arrays = [x.clone() for x in problem.arrays]
            arrays[0][0, 20] += change
            shard = lambda x: ring_attn_torch.to_layout(x, "zigzag", 2).chunk(2, 1)[group.rank()]
            arrays = [shard(x) if i < problem.sharded else x for i, x in enumerate(arrays)]
            where = {"extents": shard(ring_attn_torch.document_extents(IDS)), "length": LENGTH}
            out = call(ring_attn_torch, rule, arrays, group=group, **where)
            results.append(ring_attn_torch.gather(out, group=group, length=LENGTH))
        differs = (results[0] != results[1]).flatten(2).any(-1)
        changed.append(bool(differs[0, 20]) and not differs[0, :6].any() and not differs[0, 46:].any() and not differs[1].any())
    return all(changed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layout": "striped"}, "a recurrence needs runs of consecutive tokens"),
        ({"extents": torch.zeros(2, 3, 2, dtype=torch.long)}, "extents must be integers"),
        ({"backend": "triton"}, 'a recurrence has the backends "auto" and "blockwise"'),
        ({"backend": "fla"}, 'backend="fla": '),
        ({"g": torch.zeros(2, 4, 2)}, "g must be"),
    ],
)
def test_a_mistake_is_the_same_error_on_every_rank(gloo, arguments, words):
    for outcome in gloo.outcomes(2, mistaken, arguments):
        assert isinstance(outcome, ValueError)
        assert words in str(outcome)


def mistaken(group: Any, arguments: dict[str, Any]) -> None:
    x = torch.zeros(2, 4, 3, 5)
    arrays: dict[str, Any] = {"q": x, "k": x, "v": x, "g": x[..., 0], "beta": x[..., 0]} | arguments
    ring_attn_torch.gated_delta_rule(**arrays, group=group)


def test_a_carry_with_extents_of_another_shape_is_refused():
    bias = torch.zeros(1, 1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"extents must be integers \[1, tokens, 2\]"):
        ring_attn_torch.carry(bias, decay=bias[..., :1, :1], extents=torch.zeros(3, 2, dtype=torch.long))


def test_a_carry_in_bfloat16_is_refused():
    bias = torch.zeros(1, 1, 2, 3, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="carry takes float32 or float64"):
        ring_attn_torch.carry(bias, decay=bias[..., :1, :1])


@pytest.mark.parametrize("heads", [2, 8], ids=["gathered", "by heads"])
def test_a_carry_folds_the_runs_in_order_of_position(gloo, heads):
    for error in gloo(4, folded, heads):
        assert error < 1e-14


def folded(group: Any, heads: int) -> float:
    """Return the error of this rank's states, in zigzag: rank r has the runs r and 7 - r."""
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(2, 8, heads, 3, 5, generator=generator, dtype=torch.float64)
    transition = torch.randn(2, 8, heads, 3, 3, generator=generator, dtype=torch.float64)
    own = [group.rank(), 7 - group.rank()]
    found = ring_attn_torch.carry(bias[:, own], transition=transition[:, own], group=group)
    states = [torch.zeros_like(bias[:, 0])]
    for run in range(7):
        states.append(transition[:, run] @ states[-1] + bias[:, run])
    return relative(found, torch.stack(states, 1)[:, own].numpy())


def test_a_message_does_not_grow_with_the_length(gloo):
    (short, long), *_ = gloo(2, sent_bytes)
    assert short == long > 0


def sent_bytes(group: Any) -> list[int]:
    from unittest.mock import patch

    sent: list[int] = []
    gather = torch.distributed.all_gather_into_tensor

    def count(out: Any, x: Any, *arguments: Any, **keywords: Any) -> Any:
        sent[-1] += x.nbytes
        return gather(out, x, *arguments, **keywords)

    with patch("torch.distributed.all_gather_into_tensor", count):
        for tokens in (16, 256):
            sent.append(0)
            x = torch.ones(1, tokens, 2, 3, requires_grad=True)
            out = ring_attn_torch.gated_delta_rule(x, x, x, -x[..., 0], x[..., 0], group=group)
            ring_attn_torch.causal_conv(out.flatten(2), torch.ones(6, 4), group=group).sum().backward()
    return sent
