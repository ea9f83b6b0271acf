"""sequence_parallel: what it returns, what works inside of it, and that it leaves the model as it was."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ring_attn_torch.transformers as hf
from ring_attn_core.masks import causal
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import sum_gradients, to_layout
from ring_attn_torch.ring import loop
from ring_attn_torch.transformers import attention
from ring_attn_torch.transformers.masks import CallRing, LayerMask

from .hugging_face import LENGTH, Case, batch, in_float64, make, rounding_of, truth
from .models import shard_fully

pytestmark = pytest.mark.slow
LLAMA = Case("llama")


def near(got: dict[str, np.ndarray], case: Case = LLAMA, names: tuple[str, ...] = ()) -> None:
    want = truth(case)
    for name in names or want:
        assert relative_error(got[name], want[name]) <= rounding_of(case.model), name


def gradients(model: Any, group: Any) -> dict[str, np.ndarray]:
    sum_gradients(model, group)
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def test_layers_that_are_computed_again_run_no_second_ring(four: Any):
    for got, rings in four(2, checkpointed):
        near(got, names=tuple(got))
        assert rings == 2  # of two layers


def checkpointed(group: Any) -> tuple[dict[str, np.ndarray], int]:
    model = make("llama", implementation="ring")
    forward, rings = loop.forward, []
    counted = lambda *arguments: (rings.append(1), forward(*arguments))[1]
    with in_float64(), hf.sequence_parallel(model, group), patch.object(loop, "forward", counted):
        model._set_gradient_checkpointing()  # where a Trainer does it
        model(**batch(LLAMA)).loss.backward()
    return gradients(model, group), len(rings)


def test_logits_are_shards_in_layout_order_or_whole(four: Any):
    want = truth(LLAMA)["logits"].reshape(2, LENGTH, -1)
    outcomes = four(4, both_logits)
    shards = to_layout(torch.from_numpy(want), "striped", 4).chunk(4, 1)
    for (shard, whole, hidden), own in zip(outcomes, shards, strict=True):
        present = own.abs().sum(-1) > 0  # what pads a shard means nothing
        assert relative_error(shard[present], own[present].numpy()) < rounding_of("llama")
        assert relative_error(whole, want) < rounding_of("llama")
        assert hidden == shard.shape[1]


def both_logits(group: Any) -> list[Any]:
    model, ids = make("llama", implementation="ring"), batch(LLAMA)["input_ids"]
    with in_float64(), torch.no_grad():
        with hf.sequence_parallel(model, group, "striped"):
            output = model(ids, output_hidden_states=True)
        with hf.sequence_parallel(model, group, "striped", gather_logits=True):
            whole = model(ids, return_dict=False)[0]
    return [output.logits.numpy(), whole.numpy(), output.hidden_states[-1].shape[1]]


def test_num_items_in_batch_takes_the_place_of_the_number_of_labels(four: Any):
    labels = int((batch(LLAMA)["labels"][:, 1:] != -100).sum())
    for half, shifted in four(2, counted_otherwise, 2 * labels):
        assert abs(half - float(truth(LLAMA)["loss"]) / 2) < rounding_of("llama")
        assert abs(shifted - float(truth(LLAMA)["loss"])) < rounding_of("llama")


def counted_otherwise(group: Any, count: int) -> list[float]:
    model, given = make("llama", implementation="ring"), batch(LLAMA)
    shift_labels = F.pad(given["labels"][:, 1:], (0, 1), value=-100)
    with in_float64(), torch.no_grad(), hf.sequence_parallel(model, group):
        half = model(**given, num_items_in_batch=torch.tensor(count)).loss
        return [half.item(), model(**given, shift_labels=shift_labels).loss.item()]


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_step_without_labels_has_gradients_of_0_as_on_one_device(four: Any, chunk: int | None):
    """A Trainer passes the number of a step's labels, and a row may be cut before its first label."""
    for largest in (*four(2, without_labels, chunk), without_labels(None, chunk)):
        assert largest == 0


def without_labels(group: Any, chunk: int | None) -> float:
    """Return the largest entry of the gradients, on one device by transformers itself if ``group`` is None."""
    torch.set_grad_enabled(True)
    model, given = make("llama", implementation="eager" if group is None else "ring"), batch(LLAMA)
    given |= {"labels": torch.full_like(given["labels"], -100), "num_items_in_batch": torch.tensor(0)}
    with in_float64(), nullcontext() if group is None else hf.sequence_parallel(model, group, loss_chunk=chunk):
        model(**given).loss.backward()
    return max(float(p.grad.abs().max()) for p in model.parameters())


@pytest.mark.parametrize("more", [{}, {"shift_labels": True}, {"loss_chunk": 7}], ids=str)
def test_labels_that_padding_would_predict_count_in_no_loss(more: dict[str, Any]):
    """On the left, on the right and in a hole, as the collator of a chat leaves them and as ``labels=input_ids`` does."""
    mask, labels = torch.ones(2, LENGTH, dtype=torch.long), batch(LLAMA)["input_ids"]
    mask[0, 21:] = mask[1, :3] = mask[0, 9:11] = 0
    without = torch.cat([labels[:, :1], labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)], 1)
    losses = []
    for own in (labels, without):
        model: Any = make("llama", implementation="ring")
        shifted = {"shift_labels": F.pad(own[:, 1:], (0, 1), value=-100)} if "shift_labels" in more else {}
        with in_float64(), hf.sequence_parallel(model, loss_chunk=more.get("loss_chunk")):
            loss = model(input_ids=labels, attention_mask=mask, labels=own, **shifted).loss
            loss.backward()
        losses.append([loss.item(), *(p.grad for p in model.parameters())])
    assert losses[0][0] == losses[1][0]
    assert all(torch.equal(a, b) for a, b in zip(losses[0][1:], losses[1][1:], strict=True))


def test_embeddings_may_be_given_and_cu_seq_lens_say_what_position_ids_say(four: Any):
    packed = truth(Case("llama", "packed"))["logits"].reshape(2, LENGTH, -1)
    for got, row in four(2, from_embeddings):
        near({"loss": got["loss"], "model.embed_tokens.weight": got["embeddings"]}, names=("loss", "model.embed_tokens.weight"))
        assert relative_error(row[0], packed[0]) < rounding_of("llama")


def from_embeddings(group: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    model, given = make("llama", implementation="ring"), batch(LLAMA)
    weight = model.model.embed_tokens.weight
    packed = batch(Case("llama", "packed"))
    ends = torch.tensor([0, 9, 12, 26], dtype=torch.int32)
    with in_float64():
        with hf.sequence_parallel(model, group):
            output = model(inputs_embeds=model.model.embed_tokens(given["input_ids"]), labels=given["labels"])
            output.loss.backward()
        sum_gradients(model, group)
        with torch.no_grad(), hf.sequence_parallel(model, group, gather_logits=True):
            row = {"input_ids": packed["input_ids"][:1], "position_ids": packed["position_ids"][:1]}
            logits = model(**row, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=14, max_length_k=14).logits
    return {"loss": output.loss.detach().numpy(), "embeddings": weight.grad.numpy()}, logits.numpy()


def test_dropout_of_attention_is_the_same_on_any_number_of_ranks(four: Any):
    losses = [loss for ranks in (1, 2, 4) for loss in four(ranks, dropped)]
    assert max(abs(loss - losses[0]) for loss in losses) < rounding_of("llama")
    assert abs(losses[0] - float(truth(LLAMA)["loss"])) > 1e-3


def dropped(group: Any) -> float:
    model = make("llama", implementation="ring")
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    torch.manual_seed(3 + group.rank())  # the first rank's counts
    with in_float64(), hf.sequence_parallel(model, group), torch.no_grad():
        return model(**batch(LLAMA)).loss.item()


def test_every_layer_drops_other_weights_and_drops_them_again():
    layers, x = make("llama", "float32").model.layers, torch.randn(1, 4, 9, 8)
    seen = LayerMask(CallRing(layout="contiguous"), causal(), 9, dropout_seed=3)
    call = lambda layer: attention.ring_attention_forward(layers[layer].self_attn, x, x, x, seen, dropout=0.5)[0]
    drawn = [call(layer) for layer in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_leaving_restores_the_model(four: Any):
    assert four(2, left) == [[]] * 2


def left(group: Any) -> list[str]:
    """Return the names of the modules that differ before and after."""
    model = make("llama", "float32")
    model._set_gradient_checkpointing()

    def state() -> dict[str, Any]:
        found: dict[str, Any] = {"config": model.config.to_json_string(), "attention": model.config._attn_implementation}
        for name, module in model.named_modules():
            found[name] = {key: repr(x) if "hooks" in key else x for key, x in vars(module).items()}
        return found

    before = state()
    with hf.sequence_parallel(model, group):
        model(**batch(LLAMA))
    with pytest.raises(ValueError, match="labels must be"), hf.sequence_parallel(model, group):
        model(batch(LLAMA)["input_ids"], labels=torch.zeros(2, 3))
    after = state()
    return [name for name in before if before[name] != after[name]]


def test_a_saved_model_comes_back_on_a_ring_and_its_config_keeps_the_settings(four: Any, tmp_path: Path):
    make("llama", "float32").save_pretrained(tmp_path)
    for loss, layout, implementation in four(2, loaded, str(tmp_path)):
        assert abs(loss - float(truth(LLAMA)["loss"])) < 1e-5
        assert (layout, implementation) == ("contiguous", "ring")


def loaded(group: Any, folder: str) -> tuple[float, str, str]:
    from transformers import AutoConfig, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="ring")
    with hf.sequence_parallel(model, group), torch.no_grad():
        loss = model(**batch(LLAMA)).loss.item()
    config = hf.enable(AutoConfig.from_pretrained(folder), layout="contiguous")
    torch.manual_seed(0)
    other = hf.enable(LlamaForCausalLM._from_config(config), group, "contiguous")
    inside: Any = other.config
    with hf.sequence_parallel(other):
        hidden = other(batch(LLAMA)["input_ids"]).logits.shape[1]
    assert hidden == LENGTH // 2  # zigzag pads to 28 tokens
    settings: Any = config
    return loss, settings.ring_attention["layout"], inside._attn_implementation


def test_weights_sharded_by_fsdp2_get_the_gradients_of_one_device(four: Any):
    for got in four(2, under_fsdp):
        near(got, names=tuple(got))


def under_fsdp(group: Any) -> dict[str, np.ndarray]:
    model = make("llama", implementation="ring")
    model._set_gradient_checkpointing()
    shard_fully(group, *model.model.layers, model)
    with in_float64(), hf.sequence_parallel(model, group):
        model(**batch(LLAMA)).loss.backward()
    sum_gradients(model, group)
    return {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}


def test_lora_gets_the_gradients_of_one_device(four: Any):
    pytest.importorskip("peft")
    want = four(1, adapted, "eager")[0]
    for got in four(4, adapted, "ring"):
        assert got.keys() == want.keys()
        assert max(relative_error(got[name], want[name]) for name in want) < rounding_of("llama")


def adapted(group: Any, implementation: str) -> dict[str, np.ndarray]:
    model = make("llama", implementation=implementation)
    return lora_gradients(None if implementation == "eager" else group, model, batch(LLAMA), ["q_proj", "v_proj"])


def lora_gradients(group: Any, model: Any, given: dict[str, Any], targets: list[str]) -> dict[str, np.ndarray]:
    """Return those of drawn weights of LoRA, on a ring unless ``group`` is None."""
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

    model = get_peft_model(model, LoraConfig(r=2, target_modules=targets), autocast_adapter_dtype=False).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora" in name:
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.2)
    with in_float64():
        if group is None:
            labels = F.pad(given.pop("labels")[:, 1:], (0, 1), value=-100)
            logits = model(**given, use_cache=False).logits
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        else:
            with hf.sequence_parallel(model, group):
                model(**given).loss.backward()
            sum_gradients(model, group)
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
