"""Blocks that keep little: the same gradients to the bit, one ring in the forward, and what waits in host memory meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.utils._python_dispatch import TorchDispatchMode

from ring_attn_torch import RingTransformer, from_numpy, loss
from ring_attn_torch.call import autograd
from ring_attn_torch.layers import offload
from ring_attn_torch.layers.block import Block
from ring_attn_torch.layers.offload import OffloadedTensors
from ring_attn_torch.ring.strategies import ring as hops

from ..support.models import PACKED, TRANSFORMER, packed_batch, token_ids, transformer_weights
from ..support.selection import first
from ..support.spawn import Ranks
from .models import Group, gradients, shard_fully, step

LITTLE = ["recompute", "offload"]


def packed_on_rank(group: Group, activations: str) -> dict[str, Any]:
    """A step with every feature: logits, the loss, every gradient, and how often this rank ran a forward ring and sent."""
    model = from_numpy(RingTransformer(**PACKED, group=group, activations=activations), transformer_weights(**PACKED))
    with (
        patch.object(autograd.loop, "forward", wraps=autograd.loop.forward) as rings,
        patch.object(hops, "send", wraps=hops.send) as sends,
    ):
        logits, value = step(model, group, 7, **packed_batch())  # type: ignore
    counts = {"rings": rings.call_count, "sends": sends.call_count}
    return {"logits": logits.detach().numpy(), "loss": value.detach().numpy(), **gradients(model), **counts}


@cache
def packed(pool: Ranks, ranks: int, activations: str) -> list[dict[str, Any]]:
    return pool(ranks, packed_on_rank, activations)


@pytest.mark.parametrize("ranks", first([4, 1, 2]))
@pytest.mark.parametrize("activations", LITTLE)
def test_gradients_are_the_same_to_the_bit_and_no_ring_runs_again(gloo, activations, ranks):
    for got, expected in zip(packed(gloo, ranks, activations), packed(gloo, ranks, "keep"), strict=True):
        assert got.keys() == expected.keys()
        assert got["rings"] == PACKED["depth"]
        for name, x in expected.items():
            np.testing.assert_array_equal(got[name], x, err_msg=name)


def small(activations: str, **sizes: Any) -> tuple[RingTransformer, Tensor, Tensor]:
    """A transformer of three layers on one rank, ids and labels."""
    sizes = TRANSFORMER | {"depth": 3} | sizes
    model = from_numpy(RingTransformer(**sizes, layout="contiguous", activations=activations), transformer_weights(**sizes))
    ids, labels = map(torch.from_numpy, token_ids())
    return model, ids, labels


def parameter_gradients(model: RingTransformer, value: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, list(model.parameters()), **keywords)


def assert_equal(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("activations", LITTLE)
def test_a_graph_that_is_retained_gives_its_gradients_twice(activations):
    model, ids, labels = small(activations)
    value = loss(model(ids), labels)
    with patch.object(autograd.loop, "forward") as rings:
        assert_equal(parameter_gradients(model, value, retain_graph=True), parameter_gradients(model, value))
    assert not rings.called  # the second recomputation too begins with the first stored result


class Watching(TorchDispatchMode):
    """A mode such as those that count operations: under it attention is an op."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("activations", LITTLE)
@pytest.mark.parametrize(("forward", "backward"), [(True, True), (True, False), (False, True)])
def test_the_ring_runs_once_under_modes_too(activations, forward, backward):
    model, ids, labels = small("keep")
    expected = parameter_gradients(model, loss(model(ids), labels))
    model.activations = activations
    with patch.object(autograd.loop, "forward", wraps=autograd.loop.forward) as rings:
        with Watching() if forward else torch.enable_grad():
            value = loss(model(ids), labels)
        with Watching() if backward else torch.enable_grad():
            assert_equal(parameter_gradients(model, value), expected)
    assert rings.call_count == 3


def test_two_forward_passes_keep_apart_what_they_keep():
    model, ids, labels = small("offload")
    first, second = loss(model(ids), labels), loss(model(ids.flip(0)), labels)
    expected = [parameter_gradients(model, loss(model(x), labels)) for x in (ids, ids.flip(0))]
    assert_equal(parameter_gradients(model, first), expected[0])
    assert_equal(parameter_gradients(model, second), expected[1])


@pytest.mark.parametrize("activations", LITTLE)
def test_nothing_is_kept_without_gradients(activations):
    model, ids, _ = small(activations)
    with torch.no_grad(), patch.object(OffloadedTensors, "put") as put, patch.object(autograd, "Eager") as eager:
        model(ids)
    assert not put.called and not eager.apply.called


@pytest.mark.exhaustive
def test_compiled_blocks_run_one_forward_ring_in_one_graph():
    model, ids, labels = small("recompute", depth=1)
    expected = parameter_gradients(model, loss(model(ids), labels))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with patch.object(autograd.loop, "forward", wraps=autograd.loop.forward) as rings:
        got = parameter_gradients(model, loss(compiled(ids), labels))
    assert rings.call_count == 1
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_offload_in_one_compiled_graph_is_refused_with_the_reason():
    model, ids, _ = small("offload", depth=1)
    with pytest.raises(Unsupported, match=r"offload.* copies on a stream of its own"):
        torch.compile(model, fullgraph=True, backend="eager")(ids)


def test_a_block_is_fetched_before_the_one_after_it_is_computed_again():
    """And no more than two blocks' tensors are on the device at once."""
    model, ids, labels = small("offload", depth=5)
    told: list[str] = []
    names: weakref.WeakKeyDictionary[offload.OffloadedBlock, int] = weakref.WeakKeyDictionary()
    pages: weakref.WeakSet[offload.Page] = weakref.WeakSet()
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, sum(page._here is not None for page in pages))

    class Page(offload.Page):
        def __init__(self, x: Tensor, block: offload.OffloadedBlock) -> None:
            names.setdefault(block, len(names))
            super().__init__(x, block)
            pages.add(self)
            look()

        def fetch(self) -> None:
            if self._here is None:
                told.append(f"fetch {names[self._block]}")
            super().fetch()
            look()

    through = Block.through

    def again(block: Block, x: Tensor, attend: Any) -> Tensor:
        told.append(f"block {list(model.blocks).index(block)}")
        return through(block, x, attend)

    with patch.object(offload, "Page", Page), patch.object(Block, "through", again):
        value = loss(model(ids), labels)
        assert told == [f"block {i}" for i in range(5)]
        told.clear()
        value.backward()
    # The last block is still on the device. The input of a block is asked for just before the block runs.
    fetched = lambda i: [f"fetch {i}"] * 3
    assert told == [*fetched(3), "block 4", *fetched(2), "block 3", *fetched(1), "block 2", *fetched(0), "block 1", "block 0"]
    assert most <= 2 * offload.ON_THEIR_WAY


def test_offloaded_arrays_are_given_up_without_the_garbage_collector():
    model, ids, labels = small("offload")
    pages: list[weakref.ref] = []
    put = OffloadedTensors.put

    def noted(host: OffloadedTensors, x: Tensor):
        page = put(host, x)
        pages.append(weakref.ref(page))
        return page

    gc.disable()
    try:
        with patch.object(OffloadedTensors, "put", noted):
            loss(model(ids), labels).backward()
            assert len(pages) == 9
            assert not [page for page in pages if page() is not None]
            model(ids)  # nobody wants the backward of this one
            assert not [page for page in pages if page() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("shape", [(0, 3), (5, 7), (2, 3, 11)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_tensor_comes_back_as_it_was_in_any_number_of_pieces(monkeypatch, dtype, shape):
    monkeypatch.setattr(offload, "PIECE", 64)
    x = torch.randn(shape).to(dtype).transpose(0, -1)
    host = OffloadedTensors()
    host.begin()
    page = host.put(x)
    page.leave()
    assert sum(piece.numel() for piece in page._pieces) == x.numel()
    kept = x.clone()
    x.fill_(float("nan"))
    for _ in range(2):
        assert torch.equal(page(), kept)


class Late(TorchDispatchMode):
    """Copies that are made only where somebody waits for the event after them: CUDA's at the worst moment."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function is not torch.ops.aten.copy_.default:
            return function(*arguments, **(keywords or {}))
        self.copies.append(arguments[:2])
        return arguments[0]

    def wait(self) -> None:
        for to, source in self.copies:
            to.copy_(source)
        self.copies.clear()


@contextmanager
def beside(device: torch.device) -> Iterator[tuple[Any, Any]]:
    """In place of CUDA's streams."""
    with Late() as late:
        yield SimpleNamespace(wait_event=lambda late: late.wait()), SimpleNamespace(record_event=lambda: late)


def test_arrays_are_not_used_before_they_are_copied(monkeypatch):
    monkeypatch.setattr(offload, "_beside", beside)
    x, host = torch.randn(2, 5, 7), OffloadedTensors()
    kept = x.clone()
    host.begin()
    pages = [host.put(each) for each in x]
    assert torch.equal(pages[0](), kept[0])
    for _ in range(offload.ON_THEIR_WAY):
        host.put(torch.zeros(3))
    x.fill_(float("nan"))  # whose memory is another's once it has left
    for page, expected in zip([*pages, *pages], [*kept, *kept], strict=True):
        assert torch.equal(page(), expected)


def sharded_on_rank(group: dist.ProcessGroup, activations: str) -> list[np.ndarray]:
    """The gradients, made whole, of a model whose parameters FSDP shards."""
    from torch.distributed.tensor import DTensor

    model = from_numpy(RingTransformer(**TRANSFORMER, group=group, activations=activations), transformer_weights())
    shard_fully(group, *model.blocks, model)
    with patch.object(autograd.loop, "forward", wraps=autograd.loop.forward) as rings:
        ids = torch.from_numpy(token_ids()[0][:, :18])
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten().long(), reduction="sum").backward()
    assert rings.call_count == TRANSFORMER["depth"]
    return [p.grad.full_tensor().numpy() for p in model.parameters() if isinstance(p.grad, DTensor)]


@pytest.mark.parametrize("activations", LITTLE)
def test_parameters_that_fsdp_shards_get_the_same_gradients(gloo, activations):
    for got, expected in zip(gloo(2, sharded_on_rank, activations), gloo(2, sharded_on_rank, "keep"), strict=True):
        assert len(got) == len(expected) == len(transformer_weights())
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)
