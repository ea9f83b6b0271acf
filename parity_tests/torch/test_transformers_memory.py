"""Tests of sequence_parallel's memory: logits of a chunk of tokens, attention's results once, on the device or on the host."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import sum_gradients
from ring_attn_torch.layers import offload
from ring_attn_torch.ring import loop

from .hugging_face import SMALL, VOCAB, Case, Outcome, batch, in_float64, make, rounding_of, truth
from .models import shard_fully

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]
LLAMA, CHUNK = Case("llama"), 3
HEAD = (SMALL["hidden_size"], VOCAB)
"""The weight of the head, transposed."""


class Widest(TorchDispatchMode):
    """Counts the rows of the longest array as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.shape[-1:] == (VOCAB,) and x.shape != HEAD:
                self.rows = max(self.rows, x.numel() // VOCAB)
        return result


def near(got: Outcome, case: Case = LLAMA) -> None:
    want = truth(case)
    assert {*want} - {*got} == {"logits"}
    assert {name: x for name in got if (x := relative_error(got[name], want[name])) > rounding_of(case.model)} == {}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_loss_in_chunks_is_that_of_all_logits_without_holding_them(four: Any, ranks: int):
    for chunked, halved, rows, logits, whole in four(ranks, in_chunks):
        near(chunked)
        assert abs(halved - float(truth(LLAMA)["loss"]) / 2) < rounding_of("llama")
        assert 0 < rows <= CHUNK
        assert logits is None
        assert whole == VOCAB


def in_chunks(group: Any) -> tuple[Outcome, float, int, Any, int]:
    torch.set_grad_enabled(True)
    model, given = make("llama", implementation="ring"), batch(LLAMA)
    count = 2 * int((given["labels"][:, 1:] != -100).sum())
    with in_float64(), hf.sequence_parallel(model, group, loss_chunk=CHUNK):
        with Widest() as widest:
            output = model(**given)
            output.loss.backward()
        with torch.no_grad():
            halved = model(**given, num_items_in_batch=torch.tensor(count), return_dict=False)[0].item()
            whole = model(given["input_ids"]).logits.shape[-1]  # without labels there are logits
    return outcome(model, output.loss, group), halved, widest.rows, output.logits, whole


def outcome(model: Any, loss: Any, group: Any) -> Outcome:
    sum_gradients(model, group)
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().numpy(), **gradients}


def test_the_loss_in_chunks_under_fsdp2_is_that_of_one_device(four: Any):
    for apart in (False, True):
        for got in four(2, chunks_under_fsdp, apart):
            near(got)


def chunks_under_fsdp(group: Any, apart: bool) -> Outcome:
    """``apart``: the head is a group of weights of its own, gathered for its forward alone."""
    torch.set_grad_enabled(True)
    model = make("llama", implementation="ring")
    shard_fully(group, *model.model.layers, *([model.lm_head] if apart else []), model)
    with in_float64(), hf.sequence_parallel(model, group, loss_chunk=CHUNK):
        loss = model(**batch(LLAMA)).loss
        loss.backward()
    sum_gradients(model, group)
    return {"loss": loss.detach().numpy()} | {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}


def test_an_adapter_of_the_head_is_refused_in_chunks_by_the_name_of_peft():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make("llama", "float32"), peft.LoraConfig(target_modules=["lm_head"]))
    words = "head of LlamaForCausalLM is Linear of PEFT, .* leave loss_chunk out, or the head out of target_modules"
    with pytest.raises(ValueError, match=words):
        hf.sequence_parallel(model, loss_chunk=4).__enter__()


def test_models_whose_logits_are_more_than_a_product_with_their_head_are_refused_in_chunks():
    capped = make("gemma2", "float32")
    capped.config.final_logit_softcapping = 2.0
    with (
        hf.sequence_parallel(capped, loss_chunk=4),
        pytest.raises(ValueError, match="Gemma2ForCausalLM computes something of its logits after its head"),
    ):
        capped(**batch(Case("gemma2")))
    with pytest.raises(ValueError, match="that of ModernBertForMaskedLM has a bias"):
        hf.sequence_parallel(make("modernbert", "float32"), loss_chunk=4).__enter__()
    model = make("llama", "float32")
    for wrong, words in ((0, "loss_chunk is a number of tokens"), (True, "loss_chunk is a number of tokens")):
        with pytest.raises(ValueError, match=words):
            hf.sequence_parallel(model, loss_chunk=wrong).__enter__()
    with pytest.raises(ValueError, match="gather_logits=True asks for logits and loss_chunk for none"):
        hf.sequence_parallel(model, gather_logits=True, loss_chunk=4).__enter__()
    with hf.sequence_parallel(model, loss_chunk=4):
        assert model(**batch(LLAMA)).logits is None
    assert "forward" not in vars(model.lm_head)
    assert model(**batch(LLAMA)).logits is not None


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("offloads", [False, True])
def test_the_models_own_activation_checkpointing_runs_the_ring_once(four: Any, offloads: bool, every: int):
    """Checkpoint two layers or one of them: attention's forward runs once for each, and the host holds what was asked."""
    for got, rings, pages, after in four(2, checkpointed, offloads, every):
        near(got)
        assert rings == 2
        assert pages == (3 * (2 // every) if offloads else 0)  # a layer's input, out and lse
        assert after


def checkpointed(group: Any, offloads: bool, every: int) -> tuple[Outcome, int, int, bool]:
    torch.set_grad_enabled(True)
    model, forward, rings, pages = make("llama", implementation="ring"), loop.forward, [], []
    counted = lambda *arguments: (rings.append(1), forward(*arguments))[1]
    put = offload.OffloadedTensors.put
    paged = lambda host, x: (pages.append(1), put(host, x))[1]
    model.activation_checkpointing_enable(offload=offloads, every_n_layers=every)
    functions = lambda: [layer._gradient_checkpointing_func for layer in model.model.layers]
    before = functions()
    counting = patch.object(loop, "forward", counted), patch.object(offload.OffloadedTensors, "put", paged)
    with in_float64(), hf.sequence_parallel(model, group), counting[0], counting[1]:
        loss = model(**batch(LLAMA)).loss
        loss.backward()
    return outcome(model, loss, group), len(rings), len(pages), functions() == before


def test_a_head_and_layers_are_as_before_even_after_an_error():
    model = make("llama", "float32")
    model.activation_checkpointing_enable(offload=True)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with hf.sequence_parallel(model, loss_chunk=2):
        model(**batch(LLAMA)).loss.backward()
    with pytest.raises(ValueError, match="labels must be"), hf.sequence_parallel(model, loss_chunk=2):
        model(batch(LLAMA)["input_ids"], labels=torch.zeros(2, 3))
    for name, module in model.named_modules():
        assert {key for key, x in vars(module).items() if x is not before[name].get(key)} == set(), name
    assert all(p.grad.isfinite().all() for p in model.parameters())
