"""Tests of a loop of one's own with accelerate on its cp axis: documents stay apart, and ten steps are those of one process.

See ring_attn_torch/transformers/attention.py for accelerate's hooks on masks, and trainer.py beside it for its mesh.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch.transformers.attention import ACCELERATE_HOOK, AccelerateHooks

from ..support.models import apart
from .hugging_face import Case, batch, computing, make, rounding_of, truth
from .hugging_face_training import launched, on_cpus
from .test_transformers_training import NEAR

pytest.importorskip("accelerate")


pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]


def test_accelerates_hooks_come_back_in_front_of_others():
    layer = torch.nn.Linear(2, 2)
    accelerates: Any = lambda module, args: None
    accelerates.__qualname__ = ACCELERATE_HOOK
    layer.register_forward_pre_hook(accelerates)
    layer.register_forward_pre_hook(lambda module, args: None)
    before, hooks = list(layer._forward_pre_hooks.items()), AccelerateHooks(torch.nn.Sequential(layer))
    hooks.remove()
    assert list(layer._forward_pre_hooks.items()) == before[1:]
    hooks.restore()
    assert list(layer._forward_pre_hooks.items()) == before


def test_a_loop_with_an_accelerator_and_its_cp_axis_keeps_documents_apart(four: Any):
    """Two rings of two, each with a row of its own; accelerate's hooks, which take masks away, are off inside, back outside.

    Ten steps in float32; the gradients of the first one in float64 too, of each document by itself.
    """
    want = truth(PACKED)
    for (gradients,), _, hooks in four(4, accelerated, "float64", 1):
        assert {name: x for name in gradients if (x := relative_error(gradients[name], want[name])) > rounding_of("llama")} == {}
        assert hooks == [2, 0, 2]
    gradients, losses, _ = accelerated(None, "float32", 10)
    for got_gradients, got_losses, _ in four(4, accelerated, "float32", 10):
        assert np.abs(np.divide(got_losses, losses) - 1).max() < NEAR
        assert max(map(apart, got_gradients, gradients)) < NEAR


PACKED = Case("llama", "packed")


def accelerated(group: Any, dtype: str, steps: int) -> tuple[list[dict[str, np.ndarray]], list[float], list[int]]:
    """Gradients and losses of ``steps`` steps of AdamW, without ``group`` of whole rows on one process.

    And how many of accelerate's hooks the two layers have before, in the middle of and after the first step.
    """
    from accelerate import Accelerator, ParallelismConfig  # type: ignore[import-not-found]

    torch.set_grad_enabled(True)
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    with launched(rank, ranks), on_cpus():
        axes = None if group is None else ParallelismConfig(cp_size=2, dp_shard_size=2)
        accelerator = Accelerator(cpu=True, parallelism_config=axes)
        model: Any = make("llama", dtype, "sdpa")
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4))
        registered = lambda: [hook for m in model.modules() for hook in m._forward_pre_hooks.values()]
        kept = lambda: sum(hook.__qualname__ == ACCELERATE_HOOK for hook in registered())
        given = batch(PACKED)
        count = (given["labels"][:, 1:] != -100).sum()
        alone = {**given, "use_cache": False}  # with a cache transformers lets documents see one another
        row: Any = alone if group is None else {name: x[rank // 2 : rank // 2 + 1] for name, x in given.items()}
        gradients, losses, hooks = [], [], []
        for _ in range(steps):
            hooks.append(kept())
            mesh: Any = accelerator.torch_device_mesh
            around = nullcontext() if group is None else hf.sequence_parallel(model, mesh["cp"])
            with computing(dtype), around:
                loss = model(**row, num_items_in_batch=count).loss
                hooks.append(kept())
                accelerator.backward(loss * ranks)
            hooks.append(kept())
            total: Any = accelerator.reduce(loss.detach(), "sum")
            losses.append(total.item() / min(ranks, 2))  # both ranks of a ring have its loss
            gradients.append({name: p.grad.numpy().copy() for name, p in accelerator.unwrap_model(model).named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
        return gradients, losses, hooks[:3]
