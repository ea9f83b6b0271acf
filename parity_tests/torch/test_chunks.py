"""A transformer in PyTorch whose MLPs and loss run in chunks: the gradients of the whole, in the memory of a chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ring_attn_torch import RingTransformer, from_numpy
from ring_attn_torch.layers.block import SwiGLU
from ring_attn_torch.layers.chunks import in_chunks

from ..support.models import TRANSFORMER, token_ids, transformer_weights
from .memory import peak_bytes


def test_tokens_that_fit_in_one_chunk_are_computed_once():
    calls: list[int] = []
    function = lambda part: calls.append(part.shape[1]) or part.sin()
    x = torch.ones(1, 6, 2, requires_grad=True)
    in_chunks(function, x, 6).sum().backward()
    assert calls == [6]
    in_chunks(function, x, 5).sum().backward()
    assert calls == [6, 3, 3, 3, 3]


def test_only_the_parts_of_the_input_are_saved_through_outer_hooks():
    packed: list[int] = []
    x = torch.ones(1, 6, 2, requires_grad=True)
    with saved_tensors_hooks(lambda x: packed.append(x.numel()) or x, lambda x: x):
        in_chunks(lambda part: part.sin(), x, 2)
    assert packed == [4, 4, 4]


def test_an_mlp_in_chunks_holds_what_one_chunk_needs():
    tokens, dim, hidden = 1024, 8, 512
    x = torch.randn(1, tokens, dim, requires_grad=True)
    bytes_of = {}
    for chunk in (None, 64):
        mlp = SwiGLU(dim, hidden, chunk=chunk)
        bytes_of[chunk] = peak_bytes(lambda mlp=mlp: mlp(x).sum().backward())
    again = lambda x: checkpoint(lambda x: mlp(x.sin()), x, use_reentrant=False)
    bytes_of["computed again"] = peak_bytes(lambda: again(x).sum().backward())
    inside = tokens * hidden * 4
    assert bytes_of[None] >= 3 * inside
    for chunks in (64, "computed again"):
        assert bytes_of[chunks] <= 8 * inside / 16 + 6 * x.nbytes + 8 * hidden * dim * 4


class Products(TorchDispatchMode):
    """Counts the matrix products with an MLP's ``hidden`` features."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden, self.count = hidden, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function is torch.ops.aten.mm.default:
            self.count += any(self.hidden in x.shape for x in arguments)
        return function(*arguments, **(keywords or {}))


FORWARD, AGAIN, BACKWARD = 3, 2, 6
"""Products of an MLP: gate, up and down; of these the backward needs the first two again; two gradients of each."""


def test_an_mlp_is_computed_again_once_in_chunks_or_not_in_a_block_that_is_computed_again_too():
    """Check this for a block of ours and within torch's own checkpoint; the gradients are the same to the bit."""
    ids, gradients = torch.from_numpy(token_ids()[0]), {}
    for activations in ("keep", "recompute", "offload"):
        for chunk, chunks in ((None, 1), (10, 4)):
            sizes: dict[str, Any] = TRANSFORMER | {"depth": 1, "mlp_chunk": chunk, "activations": activations}
            model = from_numpy(RingTransformer(**sizes, layout="contiguous"), transformer_weights(depth=1))
            with Products(TRANSFORMER["hidden"]) as products:
                value = model(ids, return_hidden=True).sin().sum()
                gradients[activations, chunk] = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
            again = 0 if activations == "keep" and chunk is None else AGAIN
            assert products.count == chunks * (FORWARD + again + BACKWARD), (activations, chunk)
            assert_equal(gradients[activations, chunk], gradients["keep", chunk])
            assert_equal(gradients[activations, chunk], torch.autograd.grad(value, list(model.parameters())))


def test_an_mlp_in_chunks_may_be_computed_again_with_anything_behind_it():
    mlp, x = SwiGLU(8, 16, chunk=3), torch.randn(2, 10, 8, requires_grad=True)
    inner = lambda x: mlp(x).sin().exp()
    with Products(16) as products:
        checkpoint(mlp, x, use_reentrant=False).sum().backward()
    assert products.count == 4 * (FORWARD + AGAIN + BACKWARD)
    inputs = x, *mlp.parameters()
    got = torch.autograd.grad(checkpoint(inner, x, use_reentrant=False).sum(), inputs)
    assert_equal(got, torch.autograd.grad(inner(x).sum(), inputs))
    frozen = SwiGLU(8, 16, chunk=3).requires_grad_(False)
    frozen.down.weight.requires_grad_()
    (gradient,) = torch.autograd.grad(frozen(x.detach()).sum(), [frozen.down.weight])
    frozen.chunk = None
    torch.testing.assert_close(gradient, torch.autograd.grad(frozen(x.detach()).sum(), [frozen.down.weight])[0])


def assert_equal(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.exhaustive
def test_chunks_compile_as_one_graph_and_serve_without_gradients():
    mlp, x = SwiGLU(8, 16, chunk=3), torch.randn(2, 10, 8)
    whole = SwiGLU(8, 16)
    whole.load_state_dict(mlp.state_dict())
    compiled = torch.compile(lambda x: mlp(x), fullgraph=True, backend="aot_eager")
    results = []
    for function in (whole, mlp, compiled):
        leaf = x.clone().requires_grad_()
        results.append((function(leaf), *torch.autograd.grad(function(leaf).sin().sum(), leaf)))
    for other in results[1:]:
        for mine, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(mine, expected)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), whole(x))


def test_a_config_keeps_the_chunk():
    model = RingTransformer(**TRANSFORMER, mlp_chunk=5)
    assert type(model.config).from_json(model.config.to_json()).mlp_chunk == 5
    assert [block.mlp.chunk for block in RingTransformer.from_config(model.config).blocks] == [5, 5]
