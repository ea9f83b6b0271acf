"""sequence_parallel in a balanced layout: each call deals its documents, and what it does not run is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ring_attn_torch.transformers as hf
from ring_attn_core.masks import causal, sliding_window
from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_torch import document_extents, shard_batch
from ring_attn_torch.transformers.attention import ring_attention
from ring_attn_torch.transformers.documents import deal_batch, layer_masks
from ring_attn_torch.transformers.masks import CallRing

from .hugging_face import CLASSES, DOCUMENTS, LENGTH, SMALL, Case, batch, make

IDS = torch.ones(2, 8, dtype=torch.long)


def config_of(name: str) -> Any:
    config, _, own = CLASSES[name]
    return getattr(transformers, config)(**{**SMALL, **own})


def test_layers_of_each_mask_are_counted():
    assert layer_masks(config_of("llama")) == {causal(): 1.0}
    assert layer_masks(config_of("gemma3")) == {causal(): 1.0, sliding_window(4): 1.0}
    assert layer_masks(transformers.MistralConfig(sliding_window=5)) == {sliding_window(4): 1.0}


class FourRanks(CallRing):
    ranks = 4  # type: ignore[assignment]


def test_a_batch_is_dealt_as_shard_batch_deals_it():
    documents = torch.tensor([[0] * 9 + [1] * 3 + [2] * 12 + [-1] * 2, [0] * 4 + [-1] * 2 + [1] * 20])
    model: Any = make("llama", "float32")
    ring = deal_batch(FourRanks(layout="balanced"), model, document_extents(documents), LENGTH)
    assert ring.layout == shard_batch(documents.clamp(min=0), "balanced", 4, documents=documents).layout
    whole = deal_batch(FourRanks(layout="balanced"), model, None, LENGTH)
    assert whole.layout.runs == balanced_layout((LENGTH,), 4).runs
    assert deal_batch(FourRanks(layout="striped"), model, None, LENGTH).layout == "striped"
    tree = [[-1, 0, 0]] * 2, [[14, 9, 3]] * 2
    assert (
        deal_batch(FourRanks(layout="balanced"), model, None, LENGTH, tree).layout
        == shard_batch(documents.clamp(min=0), "balanced", 4, tree=tree).layout
    )


@pytest.mark.slow
def test_position_ids_and_cu_seqlens_deal_the_same_documents(four: Any):
    expected = balanced_layout([list(DOCUMENTS)], 2, seq_local=LENGTH // 2)
    for layouts in four(2, layouts_of_calls):
        assert layouts == [expected] * 4  # of two calls with two layers each


def layouts_of_calls(group: Any) -> list[Any]:
    model, given, seen = make("llama", "float32", "ring"), batch(Case("llama", "packed")), []
    ends = torch.tensor([0, 9, 12, 26], dtype=torch.int32)
    row = {"input_ids": given["input_ids"][:1], "position_ids": given["position_ids"][:1]}

    def recorded(*arguments: Any, **options: Any) -> Any:
        seen.append(options["layout"])
        return ring_attention(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, hf.sequence_parallel(model, group, "balanced"), torch.no_grad():
        patch.setattr("ring_attn_torch.transformers.attention.ring_attention", recorded)
        model(**row)
        model(input_ids=row["input_ids"], cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=14, max_length_k=14)
    return seen


@pytest.mark.slow
def test_generation_is_refused_by_name_on_every_rank(four: Any):
    for of_cache, of_generate in four(2, refused):
        assert of_cache == of_generate
        assert 'layout="balanced" assigns the documents of a batch to the ranks, and a cache shares one growing text' in of_cache


def refused(group: Any) -> list[str]:
    model, messages = make("llama", "float32", "ring").eval(), []
    calls: list[Any] = [lambda: model(input_ids=IDS, use_cache=True), lambda: model.generate(IDS, max_new_tokens=2)]
    with hf.sequence_parallel(model, group, "balanced"), torch.no_grad():
        for call in calls:
            with pytest.raises(ValueError, match="enter with another layout") as error:
                call()
            messages.append(str(error.value))
    return messages


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_compiled_model_takes_each_batch_of_documents(four: Any):
    for pairs in four(2, compiled):
        for fast, eager in pairs:
            assert abs(fast - eager) < 1e-5


def compiled(group: Any) -> list[tuple[float, float]]:
    import torch._dynamo

    torch._dynamo.reset()
    model, eager = make("gemma2", "float32", "ring"), make("gemma2", "float32", "ring")
    fast: Any = torch.compile(model, backend="eager", dynamic=False)
    given, losses = batch(Case("gemma2", "packed")), []
    with hf.sequence_parallel(fast, group, "balanced"), hf.sequence_parallel(eager, group), torch.no_grad():
        for document in (9, 26):
            position_ids = torch.arange(LENGTH).remainder(document)[None].expand(2, -1).contiguous()
            losses.append(tuple(each(**given | {"position_ids": position_ids}).loss.item() for each in (fast, eager)))
    return losses


def test_a_config_keeps_the_layout_and_another_name_is_refused(tmp_path: Path):
    config: Any = hf.enable(config_of("llama"), layout="balanced")
    config.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).ring_attention["layout"] == "balanced"
    with pytest.raises(ValueError, match="unknown layout 'balancd'"):
        hf.enable(config_of("llama"), layout="balancd")
