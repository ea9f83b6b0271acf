"""What a ring cannot honour of transformers is refused by name, on every rank, before anything is sent."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

import ring_attn_torch.transformers as hf
from ring_attn_core.masks import causal, full, sliding_window
from ring_attn_torch.transformers import attention, masks
from ring_attn_torch.transformers.pattern import Pattern, candidates, fits, intervals
from ring_attn_torch.transformers.whole import documents_of, ends_of_blocks

from .hugging_face import SMALL, Case, make

LLAMA = Case("llama")
IDS = torch.ones(2, 8, dtype=torch.long)

CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "a cache on one rank": ({"use_cache": True}, "pass cached tokens of different shape or value"),
    "an old cache": ({"past_key_values": "anything"}, "past_key_values is a str, of another kind, and a ring keeps a RingCache"),
    "weights": ({"output_attentions": True}, "output_attentions inside sequence_parallel: the weights of attention"),
    "routers": ({"output_router_logits": True}, "the routers' loss"),
    "last logits": ({"logits_to_keep": 1}, "out of generate"),
    "images": ({"pixel_values": torch.ones(1, 3, 4, 4)}, r"pixel_values \[1, 3, 4, 4\], which sequence_parallel does not know"),
    "a 4-D mask": ({"attention_mask": torch.zeros(2, 1, 8, 8)}, r"attention_mask must be \[2, 8\], .* got \[2, 1, 8, 8\]"),
    "labels of a shard": ({"labels": IDS[:, :4]}, r"labels must be \[2, 8\], .* shifts labels, itself"),
    "positions of a shard": ({"position_ids": IDS[:, :4]}, r"position_ids must be \[1 or 2, 8\], .* got \[2, 4\]"),
    "shifted labels alone": ({"shift_labels": IDS}, "shift_labels came without labels"),
    "both inputs": (
        {"inputs_embeds": torch.ones(2, 8, 32)},
        "either input_ids or inputs_embeds .* got .*inputs_embeds",
    ),
    "documents by number": ({"seq_idx": IDS}, "got seq_idx alone, which no attention reads"),
    "ends for two rows": ({"cu_seq_lens_q": torch.tensor([0, 8])}, "cu_seq_lens_q is for a batch of one row, got 2"),
}


@pytest.mark.slow
def test_arguments_that_cannot_be_split_are_refused_on_every_rank(four: Any):
    for messages in four(2, refused):
        for (name, (_, words)), message in zip(CALLS.items(), messages, strict=True):
            assert re.search(words, message), (name, message)


def refused(group: Any) -> list[str]:
    """The words in which each call is refused where one rank makes it, and the others a good one."""
    model, messages = make("llama", "float32", "ring"), []
    with hf.sequence_parallel(model, group):
        for more, _ in CALLS.values():
            given = {"input_ids": IDS} | (more if group.rank() else {})
            messages.append(message_of(lambda given=given: model(**given)))
    return messages


@pytest.mark.slow
def test_ranks_that_bring_other_batches_are_told_which_argument_differs(four: Any):
    for messages in four(4, differing):
        assert "pass input_ids of different content inside sequence_parallel on ranks 0 and 3" in messages[0]
        assert "pass input_ids of different shape" in messages[1]
        assert "pass attention_mask of different shape" in messages[2]
        assert "sequence_parallel is on already for this model" in messages[3]
        assert "was called outside of sequence_parallel on a group of several ranks" in messages[4]
        assert "rank 3 of the ring holds another model.norm.weight than rank 0" in messages[5]


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
    return [*messages, message_of(lambda: hf.sequence_parallel(model, group).__enter__())]


def message_of(call: Callable[[], Any]) -> str:
    """The words of the ValueError that a call ends with."""
    with pytest.raises(ValueError, match=r".") as error:
        call()
    return str(error.value)


def test_models_that_do_not_attend_by_softmax_are_refused_with_the_names_of_their_modules():
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=8, state_size=4)
    )
    with pytest.raises(ValueError, match=r"MambaForCausalLM mixes tokens by MambaMixer \(backbone.layers.0.mixer for one\)"):
        hf.enable(mamba)
    with pytest.raises(ValueError, match="layers of kind linear_attention"):
        hf.enable(transformers.Qwen3NextConfig(num_hidden_layers=4))
    with pytest.raises(ValueError, match=r"T5Config is of an encoder with a decoder"):
        hf.enable(transformers.T5Config())
    with pytest.raises(ValueError, match="take a model of transformers, got Linear"):
        hf.enable(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"MixtralConfig\.output_router_logits=True"):
        hf.enable(transformers.MixtralConfig(output_router_logits=True))
    with pytest.raises(ValueError, match="unknown layout 'spiral'"):
        hf.enable(make("llama"), layout="spiral")
    with pytest.raises(ValueError, match="a config cannot keep group"):
        hf.enable(transformers.LlamaConfig(), group="anything")  # type: ignore[arg-type]


def test_a_trainer_that_counts_labels_once_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("accelerate")
    from ring_attn_torch.transformers import trainer_arguments

    monkeypatch.setattr(trainer_arguments, "OLDEST", Version("99"))
    arguments = transformers.TrainingArguments("unused", use_cpu=True)
    with pytest.raises(ValueError, match=r"RingTrainer needs transformers 99 or newer, .* this is 5\."):
        hf.RingTrainer(model=make("llama"), args=arguments)


def test_models_that_learn_positions_need_them_whole():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=8, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    with hf.sequence_parallel(model):
        with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no rotary embedding, .* pass position_ids"):
            model(input_ids=IDS)
        assert model(input_ids=IDS, position_ids=torch.arange(8)[None], labels=IDS).loss > 0
    classifier = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SMALL))
    with (
        hf.sequence_parallel(classifier),
        pytest.raises(ValueError, match="the loss of LlamaForSequenceClassification is no sum"),
    ):
        classifier(input_ids=IDS, labels=IDS)


def test_what_a_layer_asks_beyond_softmax_over_a_band_is_refused_by_name():
    layer, x = make("llama", "float32").model.layers[0].self_attn, torch.ones(1, 2, 4, 8)
    call = lambda mask=None, **more: attention.ring_attention_forward(layer, x, x, x, mask, **more)
    with pytest.raises(ValueError, match="LlamaAttention passes position_bias to its attention"):
        call(position_bias=x)
    with pytest.raises(ValueError, match="LlamaAttention passes indices"):
        call(indices=x)
    with pytest.raises(ValueError, match="output_attentions=True asks for the weights"):
        call(output_attentions=True)
    with pytest.raises(ValueError, match=r"LlamaAttention got a mask .* torch.float32 \[1, 1, 4, 4\]"):
        call(torch.zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match=r"LlamaAttention drops 0.5 of its attention, and has no seed"):
        call(dropout=0.5)
    assert call()[0].shape == (1, 4, 2, 8)
    with pytest.raises(ValueError, match="got 1 queries and 5 keys: cross attention and caches"):
        masks.ring_mask(q_length=1, kv_length=5, mask_function=lambda b, h, q, k: k <= q, config=None)


def test_documents_begin_where_positions_begin_again_and_padding_sees_nothing():
    positions = torch.tensor([[0, 1, 2, 0, 1, 5], [0, 1, 2, 3, 4, 5]])
    extents = documents_of(positions, None, None, 6).extents
    assert extents is not None
    assert extents.tolist() == [[[0, 3]] * 3 + [[3, 5]] * 2 + [[5, 6]], [[0, 6]] * 6]
    present = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]]).bool()
    extents = documents_of(positions, present, None, 6).extents
    assert extents is not None
    assert extents.tolist() == [[[0, 3]] * 3 + [[3, 6]] * 3, [[0, 0]] * 2 + [[2, 5]] * 3 + [[0, 0]]]
    hole = documents_of(None, torch.tensor([[1, 0, 1]]).bool(), None, 3)
    assert hole.extents is None
    assert hole.key_mask is not None
    assert documents_of(positions[1:], torch.ones(1, 6).bool(), None, 6) == documents_of(None, None, None, 6)
    assert ends_of_blocks(torch.tensor([[1, 1, 0, 1, 0, 1]]).bool()).tolist() == [[2, 2, 0, 4, 0, 6]]


@pytest.mark.parametrize("tokens", [3, 9, 40])
def test_transformers_masks_are_told_apart(tokens: int):
    made = {
        "causal": (masking_utils.causal_mask_function, None, False, None),
        "full": (masking_utils.bidirectional_mask_function, None, True, None),
        "window": (masking_utils.sliding_window_causal_mask_function(5), 5, False, None),
        "both": (masking_utils.sliding_window_bidirectional_mask_function(5), 5, True, None),
        "chunks": (masking_utils.chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.long)), 5, False, 5),
    }
    wanted = {
        "causal": Pattern(causal()),
        "full": Pattern(full()),
        "window": Pattern(sliding_window(4)),
        "both": Pattern(sliding_window(5, after=5)),
        "chunks": Pattern(causal(), 5),
    }
    q, k = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    nought = torch.zeros(1, dtype=torch.long)
    for name, (function, size, both, chunk) in made.items():
        found = [p for p in candidates(size, both, chunk) if fits(p, function, size, tokens, torch.device("cpu"))]
        assert found[0] == wanted[name]
        assert torch.equal(found[0].sees(q, k), function(nought, nought, q, k).expand(tokens, tokens))
        whole = intervals(function, 1, tokens, torch.device("cpu"))
        assert whole is not None
        inside = (k >= whole[0, :, :1]) & (k < whole[0, :, 1:])
        assert torch.equal(inside, found[0].sees(q, k))
        others = [p for other, p in wanted.items() if other != name and tokens > 8]
        assert not any(fits(p, function, size, tokens, torch.device("cpu")) for p in others)


MASK_ARGUMENTS = {"attention_mask", "batch_size", "config", "device", "dtype", "kv_length", "kv_offset", "local_size"}
MASK_ARGUMENTS |= {"allow_is_bidirectional_skip", "allow_is_causal_skip", "mask_function", "q_length", "q_offset", "use_vmap"}


def test_the_interfaces_of_transformers_are_those_that_this_was_written_for():
    """A release that changes one of them fails here, not in somebody's training."""
    assert AttentionInterface()["ring"] is attention.ring_attention_forward
    assert AttentionMaskInterface()["ring"] is masks.ring_mask
    eager = inspect.signature(modeling_gpt_oss.eager_attention_forward).parameters
    assert list(eager)[:7] == ["module", "query", "key", "value", "attention_mask", "scaling", "dropout"]
    ours = inspect.signature(attention.ring_attention_forward).parameters
    sdpa = inspect.signature(AttentionInterface()["sdpa"]).parameters
    unknown = set(sdpa) - set(ours) - attention.UNHEEDED - {"kwargs", "position_bias", "cache"}
    assert unknown == set(), "a new argument: honour it, refuse it, or list it as one that says nothing new"
    source = inspect.getsource(modeling_llama.LlamaAttention.forward)
    assert "ALL_ATTENTION_FUNCTIONS.get_interface(" in source
    made = {
        name: inspect.getsource(getattr(masking_utils, name))
        for name in vars(masking_utils)
        if re.match(r"create_.*_mask$", name)
    }
    assert {name for name, text in made.items() if "mask_interface(" in text} == {
        "create_bidirectional_mask",
        "create_bidirectional_sliding_window_mask",
        "create_causal_mask",
        "create_chunked_causal_mask",
        "create_sliding_window_causal_mask",
    }
    for name, text in made.items():
        if "mask_interface(" in text:
            passed = set(re.findall(r"^        (\w+)=", text.split("= mask_interface(")[1].split("\n    )")[0], re.M))
            assert passed <= MASK_ARGUMENTS, "a new argument: honour it, or list it as one that says nothing new"
            assert {"batch_size", "q_length", "kv_length", "mask_function", "attention_mask", "config", "use_vmap"} <= passed
            assert ("local_size" in passed) == ("sliding" in name or "chunked" in name)
            assert ("allow_is_bidirectional_skip" in passed) == ("bidirectional" in name)
    assert "_gradient_checkpointing_func(partial(" in inspect.getsource(GradientCheckpointingLayer)
    assert "_attn_implementation" in dir(PreTrainedConfig)
