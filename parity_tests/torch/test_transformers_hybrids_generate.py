"""Hybrid models of transformers generate over a ring: states and last tokens of convolutions continue on every rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("transformers", minversion="5.15", reason="its mixers call functions that a ring can replace")

import torch
from torch import Tensor

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import relative_error

from .hugging_face import VOCAB, in_float64
from .hugging_face_generation import CACHE, WAYS, Text, generated, prompts
from .test_transformers_hybrids import ATTENDS_NOT, MODELS, make
from .test_transformers_refusals import message_of

pytestmark = pytest.mark.slow

PIECES = (7, 6, *[1] * 8)
"""Tokens of each call: a prompt, a piece that continues it, and tokens of their own."""
PADDED = 5
"""Tokens of padding on the left of row 1: of its prompt two are left, fewer than a convolution has taps."""
LOGITS = 1e-12


class Case(NamedTuple):
    model: str
    layout: str = "zigzag"


def tokens() -> Tensor:
    return torch.randint(3, VOCAB, (2, sum(PIECES)), generator=torch.Generator().manual_seed(3))


def alone(name: str, device: str = "cpu") -> np.ndarray:
    """Return the logits of one process after each piece, of each row alone, without padding and cache."""
    model, ends, rows = make(name).eval().to(device), np.cumsum(PIECES), []
    with torch.no_grad(), in_float64():
        for row, padded in enumerate((0, PADDED)):
            logits = model(input_ids=tokens()[row : row + 1, padded:].to(device), use_cache=False).logits[0]
            rows.append(logits[ends - 1 - padded].cpu().numpy())
    return np.stack(rows)


def over_a_ring(group: Any, cases: list[Case], device: str = "cpu", strategy: str = "auto") -> list[np.ndarray]:
    """Return what the ring has after each piece; what a process of the pool runs."""
    return [in_pieces(group, make(case.model).eval().to(device), case.layout, strategy) for case in cases]


def in_pieces(group: Any, model: Any, layout: str, strategy: str) -> np.ndarray:
    ids = tokens().to(model.device)
    mask, found, end = torch.ones_like(ids), [], 0
    mask[1, :PADDED] = 0
    cache: dict[str, Any] = {}
    with torch.no_grad(), in_float64(), hf.sequence_parallel(model, group, layout, strategy=strategy):
        for n in PIECES:
            end += n
            given = {"attention_mask": mask[:, :end], "position_ids": (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, end - n :]}
            output = model(ids[:, end - n : end], **given, use_cache=True, logits_to_keep=1, **cache)
            cache = {CACHE: output[CACHE]}
            found.append(output.logits[:, -1].cpu().numpy())
    return np.stack(found, 1)


def check(got: np.ndarray, case: Case, device: str = "cpu") -> None:
    assert relative_error(got, alone(case.model, device)) < LOGITS, case


FEW = [Case("qwen3_next"), Case("bamba", "contiguous"), Case("jamba")]


def test_logits_of_each_new_token_are_those_of_one_process(four: Any):
    for outcomes in four(2, over_a_ring, FEW):
        for case, got in zip(FEW, outcomes, strict=True):
            check(got, case)


FAMILIES = [name for name in MODELS if name not in ATTENDS_NOT]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_logits_of_every_family_are_those_of_one_process(four: Any, ranks: int, name: str):
    cases = [Case(name, layout) for layout in ("zigzag", "contiguous")]
    for outcomes in four(ranks, over_a_ring, cases):
        for case, got in zip(cases, outcomes, strict=True):
            check(got, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_and_beams_are_those_of_one_process(four: Any, name: str):
    model, given = make(name).eval(), prompts()
    whole = generated(model, {"input_ids": given["input_ids"][:1]}, num_beams=3)
    for greedy, chunks, beams in four(2, in_ways, name):
        for row, padded in enumerate((0, 5)):
            with torch.no_grad(), in_float64():
                ids = torch.from_numpy(greedy.ids[row : row + 1, padded:-1])
                want = model(input_ids=ids, use_cache=False).logits[0, -12:].numpy()
            np.testing.assert_array_equal(want.argmax(-1), greedy.ids[row, -12:])
        np.testing.assert_array_equal(chunks.ids, greedy.ids)
        np.testing.assert_array_equal(beams.ids, whole.ids)


def in_ways(group: Any, name: str) -> list[Text]:
    model, given = make(name).eval(), prompts()
    with hf.sequence_parallel(model, group):
        texts = [generated(model, given, **WAYS[way]) for way in ("greedy", "chunks")]
        return [*texts, generated(model, {"input_ids": given["input_ids"][:1]}, num_beams=3)]


def test_unsupported_calls_with_a_cache_of_states_are_refused_on_every_rank(four: Any):
    for states_alone, linear_alone, cropped, outside in four(2, refused):
        assert "Mamba2ForCausalLM keeps no cache over a ring, for none of its layers has attention" in states_alone
        assert "Lfm2ForCausalLM keeps no cache over a ring, for none of its layers has attention" in linear_alone
        assert "states of linear layers are of all tokens so far" in cropped
        assert "this is the cache of a ring" in outside


def refused(group: Any) -> list[str]:
    messages, ids = [], tokens()
    for model in (make("mamba2").eval(), make("lfm2", layer_types=["conv"] * 2).eval()):
        with hf.sequence_parallel(model, group), torch.no_grad():
            messages.append(message_of(lambda model=model: model(ids, use_cache=True)))
    model = make("lfm2").eval()
    with hf.sequence_parallel(model, group), torch.no_grad():
        cache = model(ids, use_cache=True)[CACHE]
    messages.append(message_of(lambda: cache.crop(-1)))
    return [*messages, message_of(lambda: model.model.layers[0].conv(torch.ones(2, 1, 32).double(), cache))]
