"""transformers' generate() inside sequence_parallel: the prompt is read as a ring, the cache is spread over it."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import UNIT_ROUNDOFF, relative_error
from ring_attn_torch import sum_gradients
from ring_attn_torch.transformers.cache import last_tokens

from .hugging_face import Case, batch, in_float64, make, rounding_of, truth
from .hugging_face_generation import CACHE, MODELS, NEW, PADDED, PROMPT, WAYS, Text, alone, generated, over_a_ring, prompts

pytestmark = pytest.mark.slow


def check(name: str, text: Text, greedy: bool) -> None:
    """That its logits are those of one process for this text, which has another cache, and that each token follows from them."""
    want = alone(name, text)
    bound = rounding_of(name) + 2 * UNIT_ROUNDOFF["float32"]  # generate() hands logits out in float32
    assert text.logits is not None
    assert relative_error(text.logits, want) <= bound
    if greedy:
        np.testing.assert_array_equal(want.argmax(-1), text.ids[:, -NEW:])


OFTEN = ("gemma2", "gemma3", "gpt_oss")
"""Models with windows, softcap, norms of q and k, and sinks; the others have nothing else, and other tests run llama."""


def marks_of(name: str, turn: int) -> Any:
    """Return the marks of a model on a ring: one of ``OFTEN`` always runs turn 0, and make test-all runs each turn 1."""
    if turn == 0 and name in OFTEN:
        return ()
    return pytest.mark.exhaustive if turn == 1 else pytest.mark.full


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=marks_of(name, (i + ranks // 2) % 3))
        for i, name in enumerate(MODELS)
        for ranks in (1, 2, 4)
    ],
)
def test_every_new_token_is_eager_attentions(four: Any, name: str, ranks: int):
    layout = ["zigzag", "contiguous"][(len(name) + ranks) % 2]
    for greedy, chunks in four(ranks, over_a_ring, name, layout, ["greedy", "chunks"]):
        check(name, greedy, greedy=True)
        np.testing.assert_array_equal(chunks.ids, greedy.ids)
        assert relative_error(chunks.logits, greedy.logits) <= rounding_of(name) + 2 * UNIT_ROUNDOFF["float32"]


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_angles_that_depend_on_the_length_are_those_of_transformers_own_cache(four: Any, name: str):
    """Keys that are cached keep the angles of the length that was, in transformers as here: no whole forward has these logits."""
    want = generated(make(name).eval(), {"input_ids": prompts()["input_ids"]})
    for (got,) in four(2, over_a_ring, name, "zigzag", ["greedy"], False):
        np.testing.assert_array_equal(got.ids, want.ids)
        assert got.logits is not None and want.logits is not None
        assert relative_error(got.logits, want.logits) <= rounding_of(name) + 2 * UNIT_ROUNDOFF["float32"]


def test_every_rank_draws_the_same_tokens_and_beams_are_those_of_one_process(four: Any):
    [(sampled, beams), *others] = four(2, over_a_ring, "llama", "zigzag", ["sampled", "beams"])
    check("llama", sampled, greedy=False)
    for other in others:
        np.testing.assert_array_equal(other[0].ids, sampled.ids)
    model, given = make("llama", implementation="sdpa").eval(), prompts()
    np.testing.assert_array_equal(generated(model, given, **WAYS["sampled"]).ids, sampled.ids)
    np.testing.assert_array_equal(generated(model, given, **WAYS["beams"]).ids, beams.ids)


def test_a_cache_grows_for_the_fullest_rank(four: Any):
    """Prefill six chunks of 33 tokens in zigzag over 4 ranks. One rank holds 60; 52 slots a rank have room for 208."""
    for slots in four(4, in_chunks):
        assert slots >= 60


def in_chunks(group: Any) -> int:
    """Return the slots of a cache that grows by few after six chunks of 33 tokens."""
    model = make("llama").eval()
    past: dict[str, Any] = {}
    with hf.sequence_parallel(model, group), torch.no_grad(), patch.object(hf.cache, "PAGE", 4):
        for chunk in torch.randint(3, 48, (6, 1, 33), generator=torch.Generator().manual_seed(3)):
            past = {CACHE: model(chunk, use_cache=True, logits_to_keep=1, **past)[CACHE]}
    return past[CACHE].kv.spec.slots


def test_a_chat_goes_on_drafted_tokens_are_taken_back_and_training_follows(four: Any):
    for chat, drafted, gradients in four(2, chatted):
        check("llama", chat, greedy=True)
        row = prompts()["input_ids"][:1]
        np.testing.assert_array_equal(drafted.ids, generated(make("llama").eval(), {"input_ids": row}).ids)
        want = truth(Case("llama"))
        for name, gradient in gradients.items():
            assert relative_error(gradient, want[name]) <= rounding_of("llama"), name


def chatted(group: Any) -> tuple[Text, Text, dict[str, np.ndarray]]:
    """Text of two calls, the second of which goes on from the first one's cache; with drafts; then the gradients of a step."""
    model, given = make("llama").eval(), prompts()
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    with hf.sequence_parallel(model, group), in_float64():
        first = model.generate(**given, **settings, max_new_tokens=4)
        asked = torch.cat([first.sequences, prompts()["input_ids"][:, PADDED:]], 1)  # 22 tokens, one of them not cached yet
        mask = torch.cat([given["attention_mask"], torch.ones(2, asked.shape[1] - PROMPT, dtype=torch.long)], 1)
        kept = {CACHE: first[CACHE], "attention_mask": mask}
        second = model.generate(asked, **kept, **settings, max_new_tokens=NEW, output_logits=True)
        drafted = generated(model, {"input_ids": given["input_ids"][:1]}, prompt_lookup_num_tokens=3)
        model.train()(**batch(Case("llama"))).loss.backward()
    sum_gradients(model, group)
    logits = torch.stack(second.logits, 1).numpy()
    return Text(second.sequences.numpy(), logits), drafted, {name: p.grad.numpy() for name, p in model.named_parameters()}


def test_calls_of_ones_own_return_the_logits_of_the_last_tokens(four: Any):
    """In the model's dtype: a prompt, a longer piece that the ring shares, three tokens whose logits are all wanted, and one."""
    want = alone("gemma2", Text(np.pad(lengthened(), ((0, 0), (0, 1))), None), new=lengthened().shape[1] - PADDED)
    for got in four(2, stepped):
        at = 0
        for end, logits in got:
            at = end
            assert relative_error(logits, want[:, end - PADDED - logits.shape[1] : end - PADDED]) <= rounding_of("gemma2")
        assert at == lengthened().shape[1]


def test_the_last_tokens_of_a_short_row_are_all_of_its_own_and_zeros_before():
    hidden, positions = torch.arange(1.0, 9).view(2, 4, 1), torch.tensor([[0, -1, -1, -1], [1, 0, 2, -1]])
    found = last_tokens(hidden, positions, torch.tensor([1, 3]), 3)[..., 0]
    assert found.tolist() == [[0, 0, 1], [6, 5, 7]]


def lengthened() -> np.ndarray:
    ids = prompts()["input_ids"].numpy()
    return np.concatenate([ids, np.random.default_rng(0).integers(3, 48, (2, 24))], 1)


def stepped(group: Any) -> list[tuple[int, np.ndarray]]:
    model, ids, got = make("gemma2").eval(), torch.from_numpy(lengthened()), []
    mask = torch.nn.functional.pad(prompts()["attention_mask"], (0, 24), value=1)
    kept, start = None, 0
    with hf.sequence_parallel(model, group), in_float64(), torch.no_grad():
        for end, keep in ((PROMPT, 1), (43, 1), (46, 3), (47, 1)):
            call = {"attention_mask": mask[:, :end], CACHE: kept, "use_cache": True, "logits_to_keep": keep}
            out = model(input_ids=ids[:, start:end], **call)
            got.append((end, out.logits.numpy()))
            kept, start = out[CACHE], end
    return got


def test_a_cache_is_taken_by_either_name_of_transformers_but_not_by_both(four: Any):
    for by_name, message in four(2, named):
        assert {name: x for name, x in by_name.items() if not np.array_equal(x, by_name[CACHE])} == {}
        assert "two names of one argument: pass " + CACHE in message


def named(group: Any) -> tuple[dict[str, np.ndarray], str]:
    """The logits of a step with the cache of a prompt, by the name under which it was passed; and why both names are refused."""
    model, ids, got = make("llama", "float32").eval(), prompts()["input_ids"], {}
    with hf.sequence_parallel(model, group), torch.no_grad():
        for name in ("cache", "past_key_values"):
            kept = model(input_ids=ids, use_cache=True)[CACHE]
            got[name] = model(input_ids=ids[:, -1:], **{name: kept}).logits.numpy()
        with pytest.raises(ValueError, match=r".") as caught:
            model(input_ids=ids, cache=kept, past_key_values=kept)
    return got, str(caught.value)


def test_texts_go_on_from_copies_of_the_cache_of_one_prompt(four: Any):
    """As prefix caching copies it; the cache itself goes on unchanged after its copies."""
    for got, want in four(2, copied):
        np.testing.assert_array_equal(got, want)


def copied(group: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of three steps from one cache of a prompt and two copies, and from a cache for each."""
    model, ids = make("llama", "float32").eval(), prompts()["input_ids"]
    with hf.sequence_parallel(model, group), torch.no_grad():
        read = lambda: model(input_ids=ids, use_cache=True)[CACHE]
        step = lambda token, cache: model(input_ids=torch.full((2, 1), token), **{CACHE: cache}).logits.numpy()
        kept = read()
        got = [step(5, copy.deepcopy(kept)), step(7, copy.deepcopy(kept)), step(9, kept)]
        return np.stack(got), np.stack([step(token, read()) for token in (5, 7, 9)])


def test_adapters_of_peft_and_embedded_prompts_generate_too(four: Any):
    pytest.importorskip("peft")
    for got, want in four(2, adapted):
        for name, tokens in got.items():
            np.testing.assert_array_equal(tokens, want[name])


def adapted(group: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(make("qwen3").eval(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    inside: Any = model.base_model.model
    given = prompts()
    embedded = {"inputs_embeds": inside.get_input_embeddings()(given.pop("input_ids")).detach(), **given}
    tries = {"adapters": (model, prompts()), "embedded": (inside, embedded)}
    want = {name: generated(*each).ids for name, each in tries.items()}
    got = {}
    for name, (called, asked) in tries.items():
        with hf.sequence_parallel(called, group):
            got[name] = generated(called, asked).ids
    return got, want


def test_unsupported_calls_with_a_cache_are_refused_by_name_on_every_rank(four: Any):
    for messages in four(2, refused):
        for expected, message in messages:
            assert expected in message


def refused(group: Any) -> list[tuple[str, str]]:
    llama, got = make("llama").eval(), []
    given, rank = prompts(), group.rank()
    right = {**given, "attention_mask": given["attention_mask"].flip(1)}
    tries: list[tuple[str, Any, dict[str, Any]]] = [
        ("some of its layers see chunks", make("llama4").eval(), given),
        ("pad on the left", llama, right),
        ("caches of other kinds", llama, {**given, "cache_implementation": "static"}),
        ("a RingCache, which it makes itself", llama, {**given, CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache())}),
        ("different content", llama, {**given, "input_ids": (given["input_ids"] + rank) % 48}),
        ("Call generate(..., use_cache=True), whose cache the ring shares", llama, {**given, "use_cache": False}),
        ("same seed", llama, {**given, "do_sample": True, "seed": rank}),
    ]
    for expected, model, asked in tries:
        torch.manual_seed(asked.pop("seed", 0))
        with hf.sequence_parallel(model, group), in_float64(), pytest.raises(ValueError, match=r".") as caught:
            model.generate(**asked, max_new_tokens=9, eos_token_id=None, pad_token_id=0)
        got.append((expected, str(caught.value)))
    with hf.sequence_parallel(llama, group), in_float64():
        for expected, call in (
            ("keeps no cache", {"labels": given["input_ids"], "use_cache": True}),
            ("must be [2, 23]", {"attention_mask": given["attention_mask"][:, 1:], "use_cache": True}),
        ):
            with pytest.raises(ValueError, match=r".") as caught:
                llama(input_ids=given["input_ids"], **call)
            got.append((expected, str(caught.value)))
        kept = llama.generate(**given, max_new_tokens=2, return_dict_in_generate=True)[CACHE]
        mask = torch.nn.functional.pad(given["attention_mask"], (0, 2), value=1)
        mask[0, :3] = 0
        with pytest.raises(ValueError, match=r".") as caught:
            llama(input_ids=given["input_ids"][:, :1], attention_mask=mask, **{CACHE: kept})
        got.append(("earlier tokens of row 0, and its cache holds", str(caught.value)))
    with pytest.raises(ValueError, match=r".") as caught:
        llama(input_ids=given["input_ids"][:, :1], **{CACHE: kept})
    return [*got, ("the cache of a ring", str(caught.value))]
