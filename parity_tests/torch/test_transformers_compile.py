"""torch.compile of a model inside sequence_parallel: one graph, and the same numbers in whatever order the two are called."""

from __future__ import annotations

from typing import Any

import pytest

import ring_attn_torch.transformers as hf

from ..support.selection import first
from .hugging_face import LENGTH, Case, batch, make

pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_a_compiled_model_is_compiled_once_for_all_batches(four: Any):
    for graphs, breaks, losses, gradient in four(2, compiled):
        assert abs(losses[0] - losses[1]) < 1e-5
        assert gradient < 1e-5
        assert graphs == 1
        assert breaks == 0


def compiled(group: Any) -> tuple[int, int, list[float], float]:
    import torch._dynamo

    torch._dynamo.reset()
    model, eager = make("gemma2", "float32", "ring"), make("gemma2", "float32", "ring")
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    fast: Any = torch.compile(model, backend=backend, dynamic=False)
    given, counters = batch(Case("gemma2", "packed")), torch._dynamo.utils.counters
    counters.clear()
    with hf.sequence_parallel(fast, group), hf.sequence_parallel(eager, group):
        losses = [each(**given).loss for each in (fast, eager)]
        torch.stack(losses).sum().backward()
        other = given | {"position_ids": torch.arange(LENGTH).remainder(7)[None].expand(2, -1).contiguous()}
        fast(**other)
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    worst = max(float((a.grad - b.grad).abs().max()) for a, b in pairs)
    return len(graphs), len(counters["graph_break"]), [loss.item() for loss in losses], worst


ORDERS = "model.compile() before", "compiled inside", "the compiled called", "the original called"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("order", first(ORDERS))
def test_a_model_compiled_in_any_order_computes_what_an_eager_one_does(four: Any, order: str):
    for losses, whole, gradient in four(2, compiled_otherwise, order):
        assert max(abs(loss - losses[0]) for loss in losses) < 1e-5
        assert gradient < 1e-5
        assert whole == (2, LENGTH)


def compiled_otherwise(group: Any, order: str) -> tuple[list[float], tuple[int, ...], float]:
    """The losses on two rings, the second entered with other settings, and how far the gradients are from the eager ones."""
    import torch._dynamo

    torch._dynamo.reset()
    model, eager = make("llama", "float32", "ring"), make("llama", "float32", "ring")
    compile_it = lambda: torch.compile(model, backend="eager", dynamic=False)
    fast: Any = compile_it() if "called" in order else model
    if "model.compile" in order:
        model.compile(backend="eager", dynamic=False)
    given = batch(Case("llama"))
    with hf.sequence_parallel(fast if order == "the original called" else model, group), hf.sequence_parallel(eager, group):
        called = {"compiled inside": compile_it, "the compiled called": lambda: fast}.get(order, lambda: model)()
        losses = [each(**given).loss for each in (eager, called)]
        torch.stack(losses).sum().backward()
    with hf.sequence_parallel(model, group, "striped", gather_logits=True), torch.no_grad():
        again = called(**given)
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    worst = max(float((a.grad - b.grad).abs().max()) for a, b in pairs)
    return [*(loss.item() for loss in losses), again.loss.item()], tuple(again.logits.shape[:2]), worst
