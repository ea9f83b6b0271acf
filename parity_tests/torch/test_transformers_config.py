"""The config of a model is not touched inside sequence_parallel, and calls of several threads do not meet."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ring_attn_torch.transformers as hf
from ring_attn_torch.transformers import masks
from ring_attn_torch.transformers.documents import DocumentBounds
from ring_attn_torch.transformers.shards import GlobalBatch

from .hugging_face import CLASSES, SMALL, TINY_VISION

SDPA: dict[str, Any] = {"attn_implementation": "sdpa"}
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
IDS = torch.arange(3, 29).reshape(2, 13)


def llama(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def test_a_teacher_of_the_same_config_stays_off_the_ring():
    config = transformers.LlamaConfig(**SMALL | SDPA)
    student, teacher = llama(config), llama(config)
    with torch.no_grad():
        want = teacher(input_ids=IDS).logits
        with hf.sequence_parallel(student, gather_logits=True):
            assert config._attn_implementation == "sdpa"
            assert teacher.model.layers[0].self_attn.config._attn_implementation == "sdpa"
            assert student.model.layers[0].self_attn.config._attn_implementation == "ring"
            # a cache, and a mask of 4 dimensions, which the ring refuses
            full = torch.ones(2, 1, 13, 13, dtype=torch.bool).tril()
            assert torch.allclose(teacher(input_ids=IDS, attention_mask=full, use_cache=True).logits, want, atol=1e-5)
            assert torch.allclose(student(input_ids=IDS).logits, want, atol=1e-5)
    assert student.config is config
    assert all(getattr(module, "config", config) is config for module in student.modules())


def test_a_model_made_of_the_config_inside_runs_there_and_is_off_the_ring_after():
    model = llama(transformers.LlamaConfig(**SMALL | SDPA))
    with torch.no_grad():
        want = model(input_ids=IDS).logits
        with hf.sequence_parallel(model, gather_logits=True):
            made: Any = llama(model.config)
            assert torch.allclose(made(input_ids=IDS, use_cache=False).logits, want, atol=1e-5)
            with pytest.raises(ValueError, match=r"cannot be copied.* before .* or after"):
                copy.deepcopy(model)
        assert made.config._attn_implementation == "sdpa"
        assert torch.allclose(made(input_ids=IDS, use_cache=True).logits, want, atol=1e-5)
        assert copy.deepcopy(model).config._attn_implementation == "sdpa"


def test_settings_made_in_the_config_inside_stay_after():
    model = llama(transformers.LlamaConfig(**SMALL | EAGER))
    config = model.config
    with hf.sequence_parallel(model):
        model.config.use_cache = False
        model.config.of_mine = [1]
    assert model.config is config
    assert (config.use_cache, config.of_mine, config._attn_implementation) == (False, [1], "eager")


def test_a_config_in_a_config_is_copied_with_it_and_images_keep_their_attention():
    text = {**SMALL, **CLASSES["gemma3"][2]}
    config: Any = transformers.Gemma3Config(text_config=text, vision_config=TINY_VISION, mm_tokens_per_image=4)
    model: Any = transformers.Gemma3ForConditionalGeneration(config)
    before = config.text_config._attn_implementation, config.vision_config._attn_implementation
    with hf.sequence_parallel(model):
        assert model.config.text_config._attn_implementation == "ring"
        assert model.config.vision_config is config.vision_config
        assert (config.text_config._attn_implementation, config.vision_config._attn_implementation) == before
        assert model(input_ids=IDS, labels=IDS).loss > 0
    assert model.config is config
    assert (config.text_config._attn_implementation, config.vision_config._attn_implementation) == before


def test_a_call_in_one_thread_is_not_a_call_in_another():
    call, found = GlobalBatch(masks.CallRing(), 1, 12, DocumentBounds(), device=torch.device("cpu")), []
    with masks.during(call):
        thread = threading.Thread(target=lambda: found.append(masks.running()))
        thread.start()
        thread.join()
        assert masks.running() is call
    assert found == [None]


def test_threads_in_a_sequence_parallel_of_their_own_see_their_own_call_alone():
    """Each waits in its first layer until the other is there too; models differ in the window, calls in the length."""
    windows, barrier, got = {13: 3, 9: None}, threading.Barrier(2, timeout=60), {}
    torch.manual_seed(0)
    make = lambda n: transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL | SDPA, sliding_window=windows[n])).eval()
    models = {n: make(n) for n in windows}
    with torch.no_grad():
        want = {n: model(input_ids=IDS[:, :n]).logits for n, model in models.items()}

    def call(n: int) -> None:
        lengths = []

        def wait(*_: Any) -> None:
            barrier.wait()
            lengths.append(getattr(masks.running(), "length", None))

        with hf.sequence_parallel(models[n], gather_logits=True), torch.no_grad():
            models[n].model.embed_tokens.register_forward_hook(wait)
            logits = models[n](input_ids=IDS[:, :n]).logits
            got[n] = logits, lengths, masks.running()

    threads = [threading.Thread(target=call, args=(n,)) for n in windows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, logits in want.items():
        assert got[n][1:] == ([n], None)
        assert torch.allclose(got[n][0], logits, atol=1e-5)


def test_threads_that_call_a_model_at_once_get_what_each_asked_for():
    """Each call waits in its first layer until the others are there too, with sequences of other lengths."""
    model = llama(transformers.LlamaConfig(**SMALL | SDPA))
    lengths, barrier, got = (13, 9, 5), threading.Barrier(3, timeout=60), {}
    with torch.no_grad():
        want = {n: model(input_ids=IDS[:, :n]).logits for n in lengths}

    def call(n: int) -> None:
        with torch.no_grad():
            got[n] = model(input_ids=IDS[:, :n]).logits

    with hf.sequence_parallel(model, gather_logits=True):
        waits = model.model.embed_tokens.register_forward_hook(lambda *_: (barrier.wait(), None)[1])
        threads = [threading.Thread(target=call, args=(n,)) for n in lengths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        waits.remove()
    assert {n: got[n].shape for n in lengths} == {n: x.shape for n, x in want.items()}
    assert all(torch.allclose(got[n], want[n], atol=1e-5) for n in lengths)


def test_a_trainer_takes_the_settings_of_its_ring(tmp_path: Path):
    pytest.importorskip("transformers", minversion="5.20", reason="RingTrainer needs it")
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = hf.RingTrainer(
        model=llama(transformers.LlamaConfig(**SMALL)), args=arguments, layout="striped", strategy="gather", order="global"
    )
    assert (trainer.ring.layout, trainer.ring.strategy, trainer.ring.order) == ("striped", "gather", "global")
    with pytest.raises(ValueError, match='order must be "ring" or "global", got \'up\''):
        hf.RingTrainer(model=llama(transformers.LlamaConfig(**SMALL)), args=arguments, order="up")
