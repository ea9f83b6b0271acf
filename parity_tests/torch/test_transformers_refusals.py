"""Tests of refusals: every rank refuses by name, before anything is sent, a setting of transformers that a ring cannot honour."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import sum_gradients
from ring_attn_torch.transformers import attention, masks

from .hugging_face import SMALL, Case, make, rounding_of
from .hugging_face_generation import CACHE

LLAMA = Case("llama")
IDS = torch.ones(2, 8, dtype=torch.long)

CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "a cache on one rank": ({"use_cache": True}, "pass cached tokens of different shape or value"),
    "an old cache": ({CACHE: "anything"}, f"{CACHE} is a str, of another kind, and a ring keeps a RingCache"),
    "weights": ({"output_attentions": True}, "output_attentions inside sequence_parallel: the weights of attention"),
    "trl's head": ({"fused_lm_head": True}, "has no head of trl: call trl's add_fused_lm_head"),
    "routers": ({"output_router_logits": True}, "computes no auxiliary loss of routers that sequence_parallel knows"),
    "last logits": ({"logits_to_keep": 1}, "logits_to_keep inside sequence_parallel: the last tokens are on one rank"),
    "generate without a cache": (
        {"logits_to_keep": 1, "use_cache": False},
        r"as generate\(use_cache=False\) passes them.* Call generate\(..., use_cache=True\)",
    ),
    "images": ({"pixel_values": torch.ones(1, 3, 4, 4)}, r"pixel_values \[1, 3, 4, 4\], which sequence_parallel does not know"),
    "a 4-D mask": ({"attention_mask": torch.zeros(2, 1, 8, 8)}, r"attention_mask must be \[2, 8\], .* got \[2, 1, 8, 8\]"),
    "labels of a shard": ({"labels": IDS[:, :4]}, r"labels must be \[2, 8\], .* shifts labels, itself"),
    "positions of a shard": ({"position_ids": IDS[:, :4]}, r"position_ids must be \[1 or 2, 8\], .* got \[2, 4\]"),
    "shifted labels alone": ({"shift_labels": IDS}, "shift_labels came without labels"),
    "both inputs": ({"inputs_embeds": torch.ones(2, 8, 32)}, "either input_ids or inputs_embeds .* got .*inputs_embeds"),
    "documents by number": ({"seq_idx": IDS}, "got seq_idx alone, which no attention reads"),
    "ends before the row's": (
        {"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 5])},
        "cu_seq_lens_q must end at the number of tokens, 8, got 5: count padding as a document",
    ),
    "ends for two rows": ({"cu_seq_lens_q": torch.tensor([0, 8])}, "cu_seq_lens_q is for a batch of one row, got 2"),
}


@pytest.mark.slow
def test_arguments_that_cannot_be_split_are_refused_on_every_rank(four: Any):
    check_refused(four, CALLS)


def check_refused(four: Any, calls: dict[str, tuple[dict[str, Any], str]]) -> None:
    """Assert that both ranks refuse each of ``calls``, which only one of them makes, in the words beside it."""
    for messages in four(2, refused, [more for more, _ in calls.values()]):
        for (name, (_, words)), message in zip(calls.items(), messages, strict=True):
            assert re.search(words, message), (name, message)


def refused(group: Any, calls: list[dict[str, Any]]) -> list[str]:
    """The words in which each call is refused where one rank makes it, and the others a good one."""
    model = make("llama", "float32", "ring")
    given = [{"input_ids": IDS} | (more if group.rank() else {}) for more in calls]
    with hf.sequence_parallel(model, group):
        return [message_of(lambda call=call: model(**call)) for call in given]


@pytest.mark.slow
def test_ranks_that_bring_other_batches_are_told_which_argument_differs(four: Any):
    for messages in four(4, differing):
        assert "pass input_ids of different content inside sequence_parallel on ranks 0 and 3" in messages[0]
        assert "pass input_ids of different shape" in messages[1]
        assert "pass attention_mask of different shape" in messages[2]
        assert "sequence_parallel is on already for this model" in messages[3]
        assert "was called outside of sequence_parallel on a group of several ranks" in messages[4]
        assert "nor does another model that was made inside, of model.config: make that before you enter" in messages[4]
        assert "rank 3 of the ring holds another model.norm.weight than rank 0" in messages[5]
        assert "model.config says attn_implementation='sdpa' inside sequence_parallel, by which each rank would" in messages[6]


def differing(group: Any) -> list[str]:
    last = group.rank() == 3
    model, messages = make("llama", "float32", "ring"), []
    tries = [
        {"input_ids": IDS + last},
        {"input_ids": IDS[:, : 7 + last]},
        {"input_ids": IDS} | ({"attention_mask": IDS} if last else {}),
    ]
    with hf.sequence_parallel(model, group):
        for given in tries:
            messages.append(message_of(lambda given=given: model(**given)))
        messages.append(message_of(lambda: hf.sequence_parallel(model, group).__enter__()))
    messages.append(message_of(lambda: model(IDS, use_cache=False)))
    with torch.no_grad():
        model.model.norm.weight[3] += last
    messages.append(message_of(lambda: hf.sequence_parallel(model, group).__enter__()))
    model = make("llama", "float32")
    with hf.sequence_parallel(model, group):
        model(input_ids=IDS)
        model.set_attn_implementation("sdpa")
        return [*messages, message_of(lambda: model(input_ids=IDS))]


def message_of(call: Callable[[], Any]) -> str:
    """The words of the ValueError that a call ends with."""
    with pytest.raises(ValueError, match=r".") as error:
        call()
    return str(error.value)


def test_models_that_do_not_attend_by_softmax_are_refused_with_their_modules_names():
    with pytest.raises(ValueError, match=r"mixes tokens by RwkvSelfAttention, .* \(rwkv.blocks.0.attention for one\).*refused$"):
        hf.enable(transformers.RwkvForCausalLM(transformers.RwkvConfig(hidden_size=16, num_hidden_layers=2, vocab_size=8)))
    with pytest.raises(ValueError, match="MiniMaxConfig has layers of kind linear_attention"):
        hf.enable(transformers.MiniMaxConfig(num_hidden_layers=2))
    if Version(transformers.__version__) < Version("5.15"):
        mamba = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=8)
        with pytest.raises(ValueError, match=r'by MambaMixer.* run from transformers 5.15 on, .* install "transformers>=5.15"'):
            hf.enable(transformers.MambaForCausalLM(mamba))
    with pytest.raises(ValueError, match=r"T5Config is of an encoder with a decoder"):
        hf.enable(transformers.T5Config())
    with pytest.raises(ValueError, match="take a model of transformers, got Linear"):
        hf.enable(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"MixtralConfig\.output_attentions=True"):
        hf.enable(transformers.MixtralConfig(**{"output_attentions": True, "attn_implementation": "eager"}))
    with pytest.raises(ValueError, match="unknown layout 'spiral'"):
        hf.enable(make("llama"), layout="spiral")
    with pytest.raises(ValueError, match="a config cannot keep group"):
        hf.enable(transformers.LlamaConfig(), group="anything")  # type: ignore[arg-type]


def test_a_trainer_that_counts_labels_once_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pytest.importorskip("accelerate")
    from ring_attn_torch.transformers import arguments as checks

    monkeypatch.setattr(checks, "OLDEST", Version("99"))
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match=r"RingTrainer needs transformers 99 or newer, .* this is 5\."):
        hf.RingTrainer(model=make("llama"), args=arguments)


@pytest.mark.exhaustive
def test_a_trainer_says_what_a_ring_cannot_run_when_it_is_made(tmp_path: Path):
    pytest.importorskip("transformers", minversion="5.20", reason="RingTrainer needs it")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match="LlamaForSequenceClassification is not a sum over tokens, and its head answers once"):
        hf.RingTrainer(model=classifier(), args=arguments)
    config: Any = transformers.LlamaConfig(**SMALL)
    with pytest.raises(ValueError, match="backend='triton' is for models on a GPU"):
        hf.RingTrainer(model=transformers.LlamaForCausalLM(hf.enable(config, backend="triton")), args=arguments)


def test_models_that_learn_positions_need_them_whole():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=8, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    with hf.sequence_parallel(model):
        with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no rotary embedding, .* pass position_ids"):
            model(input_ids=IDS)
        assert model(input_ids=IDS, position_ids=torch.arange(8)[None], labels=IDS).loss > 0


@pytest.mark.slow
def test_models_that_answer_once_a_row_are_refused_on_every_rank_and_what_is_under_their_head_runs(four: Any):
    """The advice of the message gives the loss, and every gradient, of one process."""
    model, labels = classifier(), torch.tensor([2, 0])
    logits = model.score(model.model(CLASSIFIED, use_cache=False).last_hidden_state[:, -1])
    loss = nn.functional.cross_entropy(logits, labels)
    loss.backward()
    want = {"loss": loss.detach().numpy()} | {name: p.grad.numpy() for name, p in model.named_parameters()}
    for messages, got in four(2, classified, labels):
        for message in messages:
            assert re.search(CLASSES_OF_ROWS, message), message
        assert {name: x for name in want if (x := relative_error(got[name], want[name])) > rounding_of("llama", "float32")} == {}


def test_a_classifier_with_adapters_is_told_where_its_model_is():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(classifier(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS"))
    with pytest.raises(ValueError, match=r"sequence_parallel\(model.get_base_model\(\).base_model, .* LlamaModel returns"):
        hf.sequence_parallel(model).__enter__()
    with hf.sequence_parallel(model.get_base_model().base_model, gather_logits=True) as under:
        assert under(input_ids=CLASSIFIED).last_hidden_state.shape == (2, 13, 32)


CLASSIFIED = torch.arange(3, 29).reshape(2, 13)
CLASSES_OF_ROWS = (
    r"the loss of LlamaForSequenceClassification is not a sum over tokens, and its head answers once a row, .* with "
    r"sequence_parallel\(model.base_model, gather_logits=True\) LlamaModel returns last_hidden_state whole"
)


def classifier() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL)
    config.num_labels = 3
    return transformers.LlamaForSequenceClassification(config)


def classified(group: Any, labels: torch.Tensor) -> tuple[list[str], dict[str, np.ndarray]]:
    torch.set_grad_enabled(True)
    model = classifier()
    messages = [message_of(lambda: hf.sequence_parallel(model, group).__enter__())]
    with hf.sequence_parallel(model.base_model, group, gather_logits=True):
        hidden = model.base_model(input_ids=CLASSIFIED).last_hidden_state
        loss = nn.functional.cross_entropy(model.score(hidden[:, -1]), labels)
        (loss / group.size()).backward()
    sum_gradients(model, group)
    return messages, {"loss": loss.detach().numpy()} | {name: p.grad.numpy() for name, p in model.named_parameters()}


class Pooled(transformers.LlamaForCausalLM):
    """Has logits of the last token alone, as heads that other names do not give away."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        output: Any = super().forward(input_ids, position_ids=position_ids, **kwargs)
        output["logits"] = output.logits[:, -1]
        return output


def test_logits_of_one_token_of_a_shard_are_refused_and_its_pooled_output_is_left_out():
    model = Pooled(transformers.LlamaConfig(**SMALL))
    bert = transformers.BertModel(transformers.BertConfig(**SMALL))
    with hf.sequence_parallel(bert):
        output = bert(input_ids=IDS, position_ids=torch.arange(8)[None])
    assert output.last_hidden_state.shape == (2, 8, 32)
    assert output.pooler_output is None
    with hf.sequence_parallel(model), pytest.raises(ValueError, match=r"head of Pooled, which returns \[2, 48\], answers once a"):
        model(input_ids=IDS)


@pytest.mark.slow
def test_a_backend_of_gpus_is_refused_for_a_model_on_a_cpu_where_that_is_known(four: Any, monkeypatch: pytest.MonkeyPatch):
    """By ``enable`` where there is no GPU; where there is one, the model may go there until sequence_parallel is entered."""
    words = r'backend=.* is for models on a GPU, and this one is on a CPU: move it first, with model.to\("cuda"\), or'
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for backend in ("hopper", "triton", "flash4", "cudnn"):
        with pytest.raises(ValueError, match=words):
            hf.enable(make("llama", "float32"), backend=backend)
    with pytest.raises(ValueError, match=r'unknown backend .spiral.: choose "auto" or one of hopper'):
        hf.enable(transformers.LlamaConfig(), backend="spiral")
    model = hf.enable(make("llama", "float32"), backend="flash")  # PyTorch's own, which runs on CPUs too
    with hf.sequence_parallel(model):
        assert model(input_ids=IDS, labels=IDS).loss > 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = hf.enable(make("llama", "float32"), backend="triton")
    with pytest.raises(ValueError, match=words):
        hf.sequence_parallel(model).__enter__()
    for message in four(2, enabled_for_a_gpu):
        assert re.search("rank 0: " + words, message)


def enabled_for_a_gpu(group: Any) -> str:
    """Enable a GPU's kernels in the config of one rank, so that all others hear of it."""
    config = transformers.LlamaConfig(**SMALL)
    if group.rank() == 0:
        hf.enable(config, backend="triton")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    return message_of(lambda: hf.sequence_parallel(model, group).__enter__())


def test_processes_of_torchrun_that_are_not_connected_are_refused(monkeypatch: pytest.MonkeyPatch):
    model = make("llama", "float32")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"torchrun has started 4 processes, .* call torch.distributed.init_process_group"):
        hf.sequence_parallel(model).__enter__()
    monkeypatch.setenv("WORLD_SIZE", "1")
    with hf.sequence_parallel(model):
        assert model(input_ids=IDS, labels=IDS).loss > 0


def test_requests_of_a_layer_beyond_softmax_over_a_band_are_refused_by_name():
    layer, x = make("llama", "float32").model.layers[0].self_attn, torch.ones(1, 2, 4, 8)
    call = lambda mask=None, **more: attention.ring_attention_forward(layer, x, x, x, mask, **more)
    with pytest.raises(ValueError, match="LlamaAttention passes position_bias to its attention"):
        call(position_bias=x)
    with pytest.raises(ValueError, match="LlamaAttention passes indices"):
        call(indices=x)
    with pytest.raises(ValueError, match=r"output_attentions=True .*: the weights of attention"):
        call(output_attentions=True)
    with pytest.raises(ValueError, match=r"LlamaAttention got a mask .* torch.float32 \[1, 1, 4, 4\]"):
        call(torch.zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match=r"LlamaAttention drops 0.5 of its attention, and has no seed"):
        call(dropout=0.5)
    assert call()[0].shape == (1, 4, 2, 8)
    with pytest.raises(ValueError, match="got 1 queries and 5 keys: cross attention and caches"):
        masks.ring_mask(q_length=1, kv_length=5, mask_function=lambda b, h, q, k: k <= q, config=None)
