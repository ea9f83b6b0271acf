"""``check_ranks``: what differs between the ranks is named, with who holds what, on all of them; what is equal passes."""

from __future__ import annotations

import math
from collections import OrderedDict
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from ring_attn_core import Run, causal, full
from ring_attn_torch import RingTransformer, check_every_call, check_ranks, ring_attention, shard_batch
from ring_attn_torch.ring import agreement

from .models import shard_fully

RANKS = 4


def model(width=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width))


def everything() -> dict[Any, Any]:
    """One of each that can be compared, NaNs and empty ones among them."""
    return {
        "model": model(),
        "tensors": [torch.full((2, 3), math.nan), torch.ones(3, dtype=torch.bfloat16), torch.tensor(True), torch.ones(0, 2)],
        "turned": (torch.arange(6).reshape(2, 3).T, torch.ones(2, dtype=torch.complex64).conj()),
        "shard": shard_batch(torch.arange(8)[None], "zigzag", 2, 1),
        "numpy": {"seed": np.int64(3), "rate": np.float32(0.1), "array": np.ones((2, 2), np.float16)},
        "plain": [1, -(2**70000), 0.5, math.nan, math.inf, "zigzag", "x" * 1000, True, None, causal(), Run(0, 4)],
        0: {},
    }


def another_weight(x):
    with torch.no_grad():
        x["model"][0].weight[1, 2] += 1e-7


def another_buffer(x):
    x["model"][1].running_var[0] = 2.0


def another_count(x):
    x["model"][1].num_batches_tracked += 5


def frozen(x):
    x["model"][0].bias.requires_grad_(False)


def another_nan(x):
    x["tensors"][0].view(torch.int32)[0, 0] += 1


def negative_zero(x):
    x["tensors"][3] = torch.zeros(2) * (-1 if dist.get_rank() == 2 else 1)


def one_weight_less(x):
    x["model"][0].bias = None


DIFFERENT: dict[str, Any] = {
    "a weight": (
        another_weight,
        r"^1 of \d+ entries are not the same everywhere: model.0.weight \(Parameter float32 \[3, 4\]\) is #\w{16} on "
        r"ranks 0, 1, 3, #\w{16} on rank 2. Load or broadcast",
    ),
    "a buffer": (another_buffer, r"model.1.running_var \(Tensor float32 \[3\]\) is #\w+ on ranks 0, 1, 3, #\w+ on rank 2"),
    "a count": (another_count, r"num_batches_tracked \(Tensor int64 \[\]\) is 0 #\w+ on ranks 0, 1, 3, 5 #\w+ on rank 2"),
    "frozen": (frozen, r"model.0.bias is Parameter float32 \[3\] on ranks 0, 1, 3, frozen Parameter float32 \[3\] on rank 2\. "),
    "a NaN's bits": (another_nan, r"tensors.0 \(Tensor float32 \[2, 3\]\) is #"),
    "absent": (one_weight_less, r"model.0.bias is Parameter float32 \[3\] on ranks 0, 1, 3, absent on rank 2"),
    "one more": (lambda x: x.update(more=1), "more is int on rank 2, absent on ranks 0, 1, 3"),
    "a shape": (lambda x: x.update(model=model(5)), r"^6 of .*model.1.weight is Parameter float32 \[3\] on .* \[5\] on rank 2"),
    "a dtype": (
        lambda x: x["tensors"].__setitem__(1, torch.ones(3)),
        r"tensors.1 is Tensor bfloat16 \[3\] on ranks 0, 1, 3, Tensor float32 \[3\] on rank 2",
    ),
    "a seed": (lambda x: x["plain"].__setitem__(0, 8), r"plain.0 \(int\) is 1 on ranks 0, 1, 3, 8 on rank 2"),
    "a long number": (lambda x: x["plain"].__setitem__(1, 2**70000), r"plain.1 \(int\) is -0x10000.*#\w+ on ranks 0, 1, 3"),
    "a type": (lambda x: x["plain"].__setitem__(0, True), "plain.0 is int on ranks 0, 1, 3, bool on rank 2"),
    "a text": (lambda x: x["plain"].__setitem__(6, "x" * 1001), r"plain.6 \(str\) is 'x+\.\.\. #\w+ on ranks 0, 1, 3"),
    "a mask": (
        lambda x: x["plain"].__setitem__(9, full()),
        r"plain.9 \(Band\) is Band\(lo=0, hi=None\) on ranks 0, 1, 3, Band\(lo=None, hi=None\) on rank 2",
    ),
    "numpy's": (lambda x: x["numpy"].update(seed=np.int64(4)), r"numpy.seed \(int64 int64 \[\]\) is 3 #\w+ on ranks .* 4 #"),
    "a shard's length": (lambda x: x.update(shard=x["shard"]._replace(length=7)), "shard.length .*8 on ranks 0, 1, 3, 7 on"),
}


def changed_on_rank_2(group, change):
    what = everything()
    if dist.get_rank() == 2 and change is not None:
        DIFFERENT[change][0](what)
    check_ranks(what, group)
    return "equal"


def test_equal_values_pass(gloo):
    assert gloo(RANKS, changed_on_rank_2, None) == ["equal"] * RANKS


@pytest.mark.parametrize("change", DIFFERENT)
def test_a_difference_is_named_with_its_ranks_on_all_ranks(gloo, change):
    gloo.refuse(DIFFERENT[change][1], RANKS, changed_on_rank_2, change)


def test_many_weights_that_differ_on_every_rank_fit_into_one_message(gloo):
    gloo.refuse(r"^15 of 20 entries (.*and 4 more){8}.*; and 7 more\. Load", 8, other_seeds)  # eight contents of each entry


def other_seeds(group):
    torch.manual_seed(dist.get_rank())
    check_ranks(RingTransformer(vocab=8, dim=8, depth=2, heads=2), group)


def test_the_order_of_names_and_the_kind_of_dict_do_not_matter(gloo):
    gloo(2, in_another_order)


def in_another_order(group):
    check_ranks(OrderedDict(a=1, b=[2]) if dist.get_rank() else {"b": (2,), "a": 1}, group)


NOT_COMPARED: dict[str, Any] = {
    "a function": (lambda: {"a": {"f": len}}, "a.f must be an nn.Module, a tensor or a number, .*, got builtin"),
    "a set": (lambda: [1, {2}], "1 must be an nn.Module, a tensor or .*, got set"),
    "by itself": (object, "what must be an nn.Module, a tensor or .*, got object"),
    "objects of numpy": (lambda: {"x": np.array([None])}, r"x must be .*, got ndarray of shape \[1\]"),
    "a sparse tensor": (lambda: {"x": torch.ones(2, 2).to_sparse()}, "x is a Tensor of layout torch.sparse_coo"),
    "a wrapper": (lambda: {"x": TwoTensor(torch.ones(2), torch.zeros(2))}, "x is a TwoTensor of .* dense tensors that"),
    "on meta": (lambda: nn.Linear(2, 2, device="meta"), "weight has no values yet: .* on the meta device"),
    "lazy": (lambda: nn.LazyLinear(2), "weight has no values yet: .* lazy"),
    "two of one name": (lambda: {"a.b": 1, "a": {"b": 2}}, "two entries are called 'a.b'"),
    "a key": (lambda: {"a": {(0, 1): 1}}, "a has a key of type tuple: entries are named by str or int"),
}


@pytest.mark.parametrize("case", NOT_COMPARED)
def test_incomparable_values_are_refused_on_all_ranks(gloo, case):
    gloo.refuse(f"^rank 1: {NOT_COMPARED[case][1]}", 2, refused_on_rank_1, case)
    with pytest.raises(ValueError, match=f"^{NOT_COMPARED[case][1]}"):
        check_ranks(NOT_COMPARED[case][0]())


def refused_on_rank_1(group, case):
    check_ranks(NOT_COMPARED[case][0]() if dist.get_rank() else {}, group)


def test_a_ring_of_one_asks_no_other_rank(gloo):
    with patch.object(torch.Tensor, "cpu", side_effect=AssertionError("read")):
        check_ranks(everything())
    gloo(1, changed_on_rank_2, None)


def test_a_rank_that_never_comes_is_named_after_the_timeout(gloo):
    results = gloo.outcomes(RANKS, one_stays_away)
    assert results[2] == "stayed away"
    for rank in (0, 1, 3):
        assert isinstance(results[rank], RuntimeError)
        assert "check_ranks was reached by 3 of 4 ranks: rank 2 did not come to the same call" in str(results[rank])
    assert gloo(RANKS, changed_on_rank_2, None) == ["equal"] * RANKS, "the group can be used again"


def one_stays_away(group):
    if dist.get_rank() == 2:
        agreement.history_of(group).next_call()
        return "stayed away"
    with patch.object(agreement, "timeout", lambda *_: timedelta(seconds=2)):
        return check_ranks({"seed": 1}, group)


@pytest.mark.parametrize("check", [False, True], ids=["by itself", "inside check_every_call"])
def test_a_rank_that_calls_ring_attention_instead_is_told_so(gloo, check):
    gloo.refuse("different calls: check_ranks on rank 0, ring_attention on rank 1", 2, another_call, check)
    assert gloo(2, changed_on_rank_2, None) == ["equal"] * 2


def another_call(group, check):
    x = torch.ones(1, 4, 2, 8)
    agree = lambda: check_ranks(1, group) if dist.get_rank() == 0 else ring_attention(x, x, x, group=group, scale=0.321)
    if not check:
        return agree()
    with check_every_call(group):
        return agree()


def test_equal_ones_cost_one_small_exchange(gloo):
    gloo(2, counted)


def counted(group):
    told = []
    with patch.object(agreement, "_exchange", wraps=agreement._exchange) as exchange:
        check_ranks(everything(), group)
        told += [call.args[0] for call in exchange.call_args_list]
    assert len(told) == 1
    assert len(str(told[0])) < 200


def sharded(mesh, placements, whole, local):
    """A DTensor of which this rank holds ``local``, a part of ``whole``'s shape."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def test_shards_of_dtensors_are_compared_where_they_are_copies(gloo):
    gloo(8, replicated_over_data)


def replicated_over_data(group):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh.get_local_rank("data"), mesh.get_local_rank("tensor")
    whole = torch.arange(8.0)
    local = lambda: whole.chunk(4)[tensor].clone()
    check = lambda local, placements=(Replicate(), Shard(0)), **ring: check_ranks(
        {"w": nn.Parameter(sharded(mesh, placements, whole, local))}, **ring
    )
    for ring in ({"group": mesh["data"]}, {"group": mesh["tensor"]}, {}):
        check(local(), **ring)

    wrong = local()
    if (data, tensor) == (1, 2):
        wrong[1] = 99.0
    part = r"w \(Parameter float32 \[8\] \[Replicate\(\), Shard\(dim=0\)\] on a mesh of \[2, 4\], part 2 of 4 on mesh dim 1\)"
    with pytest.raises(ValueError, match=rf"^1 of 1 .*{part} is #\w+ on rank 2, #\w+ on rank 6\. "):
        check(wrong)
    if tensor == 2:
        with pytest.raises(ValueError, match=rf"^1 of 1 .*{part} is #\w+ on rank 0, #\w+ on rank 1\. "):
            check(wrong, group=mesh["data"])
    else:
        check(wrong, group=mesh["data"])
    check(wrong, group=mesh["tensor"])  # nobody there holds what another one should hold

    cut_twice = whole.chunk(2)[data].chunk(4)[tensor].clone()
    placements = (Shard(0), Shard(0)) if data else (Replicate(), Shard(0))
    with pytest.raises(ValueError, match=r"w is Parameter .*Replicate\(\), .* on ranks 0, 1, 2, 3, Parameter .* on ranks 4"):
        check(cut_twice if data else local(), placements)


def test_modules_of_fsdp_are_compared(gloo):
    gloo(2, of_fsdp)


def of_fsdp(group):
    layer = model()
    shard_fully(group, layer)
    check_ranks(layer, group)
    dict(layer.named_buffers())["1.running_mean"].add_(dist.get_rank())
    with pytest.raises(ValueError, match=r"^1 of \d+ .*1.running_mean"):
        check_ranks(layer, group)
