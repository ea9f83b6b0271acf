"""The loss in chunks on one GPU, where narrow factors are multiplied into float32: against float64, and within its memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import loss

from ..support.losses import exact_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_loss_of_hidden_states_in_chunks_is_exact(dtype):
    rng = np.random.default_rng(0)
    narrow = [torch.from_numpy(rng.standard_normal(shape) / 8).to("cuda", dtype) for shape in ((1, 1000, 64), (517, 64))]
    hidden, head = (x.requires_grad_() for x in narrow)
    labels = torch.from_numpy(rng.integers(0, 517, (1, 1000))).cuda()
    labels[:, ::3] = -100
    wide = [x.detach().double().cpu().numpy() for x in (hidden, head)]
    truth = exact_loss(wide[0], wide[1], labels.cpu().numpy(), "sum")
    for of_head in (head, head.detach().float().requires_grad_()):
        value = loss(hidden, labels, head=of_head, chunk=128, reduction="sum")
        dhidden, dhead = (x.double().cpu().numpy() for x in torch.autograd.grad(value, (hidden, of_head)))
        np.testing.assert_allclose(value.item(), truth["loss"], rtol=1e-5)
        assert relative_error(dhead, truth["dhead"]) <= 4 * torch.finfo(dtype).eps + 1e-5
        assert relative_error(dhidden, truth["dhidden"]) <= 4 * torch.finfo(dtype).eps + 1e-5


def test_it_takes_the_gradients_and_a_chunk_of_logits():
    tokens, dim, vocab, chunk = 8192, 128, 32768, 512
    hidden, head = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((1, tokens, dim), (vocab, dim)))
    leaves = [x.requires_grad_() for x in (hidden, head)]
    labels = torch.randint(vocab, (1, tokens), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss(leaves[0], labels, head=leaves[1], chunk=chunk).backward()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= 12 * chunk * vocab + 4 * hidden.nbytes + 8 * head.nbytes + 2**26  # all logits: 1 GiB in float32 alone
