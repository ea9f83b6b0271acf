"""Recurrences under the names of FLA, mamba_ssm and causal_conv1d compute the rules over a ring, and refuse what they lack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ring_attn_torch import functional, gated_delta_rule, state_space, to_layout

from ..support.recurrences import DOCUMENTS, SEQUENTIAL, ids_of, make, relative
from .test_transformers_refusals import message_of

ROW = DOCUMENTS[:1]


def under_known_names(rule: str, arrays: Any, **where: Any) -> torch.Tensor:
    """Compute a rule of one row with its documents by cu_seqlens or seq_idx."""
    ends = torch.tensor([0, *ROW[0]]).cumsum(0)
    if rule in ("gdn", "kda"):
        function = functional.chunk_gated_delta_rule if rule == "gdn" else functional.chunk_kda
        return function(*arrays, cu_seqlens=ends, **where)[0]
    if rule == "convolution":
        x, weight, bias = arrays
        return functional.causal_conv1d_fn(x.mT, weight, bias, ids_of(ROW), activation="silu", **where).mT
    x, dt, B, C, A, D = arrays
    if rule == "mamba2":
        return functional.mamba_chunk_scan_combined(x, dt, A, B, C, 64, D, seq_idx=ids_of(ROW), **where)
    return functional.selective_scan_fn(x.mT, dt.mT, A, B.mT, C.mT, D, **where).mT


def test_known_names_compute_the_rules_over_a_ring(gloo):
    for of_rules in gloo(2, errors):
        assert max(of_rules.values()) < 1e-13, of_rules


def errors(group: Any) -> dict[str, float]:
    """Return the largest relative error of each rule's result and gradients; selective_scan_fn knows no documents."""
    return {rule: max(errors_of(group, rule, rule != "mamba1")) for rule in SEQUENTIAL}


def errors_of(group: Any, rule: str, documents: bool) -> list[float]:
    """Return the relative errors of a rank's result and gradients; those of whole arrays are summed over the ranks."""
    problem, length = make(rule, documents, ROW), sum(ROW[0])
    shard = lambda x: to_layout(x, "zigzag", group.size()).chunk(group.size(), 1)[group.rank()]
    leaves = [(shard(x) if i < problem.sharded else x).clone().requires_grad_() for i, x in enumerate(problem.arrays)]
    out = under_known_names(rule, leaves, group=group, layout="zigzag", length=length)
    gradients = torch.autograd.grad((out * shard(problem.cotangent(problem.shape))).sum(), leaves)
    for whole in gradients[problem.sharded :]:
        torch.distributed.all_reduce(whole, group=group)
    expected = [torch.from_numpy(x) for x in problem.reference()]
    expected[: problem.sharded + 1] = [shard(x) for x in expected[: problem.sharded + 1]]
    return [relative(x, y.numpy()) for x, y in zip((out.detach(), *gradients), expected, strict=True)]


def test_steps_and_gates_are_those_of_mamba():
    x, dt, B, C, A, D = make("mamba2", False).arrays
    z, bias = torch.randn(x.shape, dtype=x.dtype), torch.randn(4, dtype=x.dtype)
    given = {"dt_bias": bias, "dt_softplus": True, "dt_limit": (0.3, 1.5), "z": z}
    found = functional.mamba_chunk_scan_combined(x, dt, A, B, C, 8, D, **given)
    steps = F.softplus(dt + bias).clamp(0.3, 1.5)
    expected = state_space(x, steps, A, B, C, D=D, layout="contiguous") * F.silu(z)
    assert relative(found, expected.numpy()) < 1e-15
    x, dt, B, C, A, D = make("mamba1", False).arrays
    z, bias = torch.randn(x.shape, dtype=x.dtype), torch.randn(4, dtype=x.dtype)
    found = functional.selective_scan_fn(x.mT, dt.mT, A, B.mT, C.mT, D, z.mT, bias, True)
    expected = state_space(x, F.softplus(dt + bias), A, B, C, D=D, layout="contiguous") * F.silu(z)
    assert relative(found.mT, expected.numpy()) < 1e-15


REFUSED = [
    ("causal_conv1d_fn", "convolution", {"return_final_states": True}),
    ("chunk_gated_delta_rule", "gdn", {"initial_state": torch.zeros(1)}),
    ("chunk_kda", "kda", {"use_gate_in_kernel": True}),
    ("mamba_chunk_scan_combined", "mamba2", {"return_final_states": True}),
    ("selective_scan_fn", "mamba1", {"return_last_state": True}),
]


def test_arguments_that_a_ring_lacks_are_refused_by_name_on_every_rank(gloo):
    for messages in gloo(2, refusals):
        for (function, _, given), message in zip(REFUSED, messages, strict=True):
            assert f"functional.{function} got {next(iter(given))}, which it does not have over a ring" in message


def refusals(group: Any) -> list[str]:
    tried = lambda function, rule, given: getattr(functional, function)(*make(rule, False).arrays[:5], **given, group=group)
    return [message_of(lambda each=each: tried(*each)) for each in REFUSED]


WRONG_ON_RANK_1 = [
    ("chunk_kda", "kda", 3, lambda g: g[..., 0], {}, "got 3 axes"),
    ("causal_conv1d_fn", "convolution", 0, lambda x: x[0, 0], {}, "out of range"),
    ("mamba_chunk_scan_combined", "mamba2", 1, lambda dt: dt, {"dt_bias": torch.zeros(3)}, "size of tensor"),
    ("mamba_chunk_scan_combined", "mamba2", 0, lambda x: x, {"z": torch.zeros(1, 2)}, "the gate z must have the shape"),
    ("selective_scan_fn", "mamba1", 3, lambda B: B[0, 0], {}, "out of range"),
]
"""A function, its rule, the array that is wrong on rank 1 and how, arguments of rank 1 alone, and words of the error."""


def test_a_mistake_of_one_rank_alone_raises_on_every_rank(gloo):
    for messages in gloo(2, mistakes_of_rank_1):
        for (function, *_, expected), message in zip(WRONG_ON_RANK_1, messages, strict=True):
            assert expected in message and message.startswith("rank 1: "), (function, message)


def mistakes_of_rank_1(group: Any) -> list[str]:
    def message(function: str, rule: str, index: int, spoil: Any, given: dict[str, Any], _: str) -> str:
        arrays = list(make(rule, False).arrays[:5])
        if rule.startswith("mamba"):
            arrays = [arrays[i] for i in (0, 1, 4, 2, 3)]
        if rule in ("mamba1", "convolution"):
            arrays = [x.mT if x.ndim == 3 else x for x in arrays[:5]]
        if group.rank() == 1:
            arrays[index] = spoil(arrays[index])
        given = given if group.rank() == 1 else {}
        with pytest.raises((ValueError, RuntimeError)) as error:
            getattr(functional, function)(*arrays, **given, group=group, layout="contiguous")
        return str(error.value)

    return [message(*each) for each in WRONG_ON_RANK_1]


def test_cu_seqlens_that_end_beyond_the_row_are_refused():
    q, k, v, g, beta = make("gdn", False).arrays
    with pytest.raises(ValueError, match="cu_seqlens ends at 90, beyond length=83"):
        functional.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=torch.tensor([0, 90]))
    assert functional.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=None, output_final_state=False)[1] is None


def test_documents_of_other_rows_are_refused_and_those_of_a_padded_row_are_not():
    x, weight = torch.randn(1, 2, 14), torch.randn(2, 3)
    with pytest.raises(ValueError, match="causal_conv1d_fn: seq_idx must have the 14 tokens of the row, got 13"):
        functional.causal_conv1d_fn(x, weight, seq_idx=torch.zeros(1, 13, dtype=torch.int32))
    found = functional.causal_conv1d_fn(x, weight, seq_idx=torch.zeros(1, 13, dtype=torch.int32), length=13)
    assert torch.equal(found[..., :13], functional.causal_conv1d_fn(x, weight)[..., :13])


def test_a_second_derivative_is_refused():
    q, k, v, g, beta = (x.requires_grad_() for x in make("gdn", False).arrays)
    (dq,) = torch.autograd.grad(gated_delta_rule(q, k, v, g, beta, layout="contiguous").square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative"):
        dq.square().sum().backward()


def test_kda_without_a_decay_a_channel_is_refused():
    q, k, v, g, beta = make("gdn", False).arrays
    with pytest.raises(ValueError, match="got 3 axes: use chunk_gated_delta_rule"):
        functional.chunk_kda(q, k, v, g, beta)
