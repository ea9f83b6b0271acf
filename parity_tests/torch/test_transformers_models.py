"""Models of transformers over a ring are eager attention on one process: logits, loss and every gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import bound, relative_error

from ..support.selection import first
from .hugging_face import CLASSES, DOCUMENTS, KINDS, Case, Outcome, batch, make, over_a_ring, result_of, rounding_of, truth

pytestmark = pytest.mark.slow


def cases_of(name: str, ranks: int, everything: bool) -> list[Case]:
    """Every kind in one layout of the two, which alternate; or in both."""
    layouts = ["zigzag", "contiguous"]
    both = [Case(name, kind, layout) for kind in KINDS[name] for layout in layouts]
    return both if everything else [case for i, case in enumerate(both) if i % 2 == (i // 2 + ranks // 2) % 2]


def compare(got: Outcome, case: Case) -> None:
    want = truth(case)
    assert {name for name in got.keys() ^ want.keys() if got[name].any()} == set()  # without a gradient, or 0 of a sum
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert {name: error for name, error in errors.items() if error > rounding_of(case.model)} == {}, case


ONE_OF_EACH = ("llama", "qwen2_5_vl", "gemma3", "gpt_oss", "modernbert", "llama4")
"""A model of each way to call attention; the others differ from one of these in their weights and numbers."""


TWICE = ("mistral", "qwen3", "phi3")
"""Those that call attention as llama does."""

OTHERS = [(name, (2, 4)[i % 2]) for i, name in enumerate(name for name in CLASSES if name not in ONE_OF_EACH)]
ALWAYS = [(name, 2) for name in ONE_OF_EACH if name != "llama4"]
MOSTLY = [("llama4", 4), ("gemma3", 4), ("gpt_oss", 4), *(each for each in OTHERS if each[0] not in TWICE)]
ALL = dict.fromkeys([*ALWAYS, *MOSTLY, *OTHERS, *((name, ranks) for ranks in (2, 4) for name in ONE_OF_EACH)])


@pytest.mark.parametrize(("name", "ranks"), first(ALL, len(ALWAYS), len(ALWAYS) + len(MOSTLY)))
def test_logits_loss_and_gradients_are_eager_attentions(four: Any, name: str, ranks: int):
    cases = cases_of(name, ranks, everything=False)
    for outcomes in four(ranks, over_a_ring, cases):
        for got, case in zip(outcomes, cases, strict=True):
            compare(got, case)


@pytest.mark.parametrize(("name", "ranks"), first([("llama", 4), ("gemma3", 3), ("qwen2_5_vl", 4), ("llama4", 2)], 2, 3))
def test_they_are_in_a_balanced_layout(four: Any, name: str, ranks: int):
    cases = [Case(name, kind, "balanced") for kind in KINDS[name]]
    for outcomes in four(ranks, over_a_ring, cases):
        for got, case in zip(outcomes, cases, strict=True):
            compare(got, case)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", CLASSES)
def test_they_are_in_either_layout(four: Any, name: str, ranks: int):
    cases = cases_of(name, ranks, everything=True)
    for outcomes in four(ranks, over_a_ring, cases):
        for got, case in zip(outcomes, cases, strict=True):
            compare(got, case)


@pytest.mark.parametrize("name", first(["gpt_oss", "gemma2", "llama4", "llama", "modernbert"], 2, 3))
def test_in_float32_they_are_as_near_to_the_truth_as_eager_attention_is(four: Any, name: str):
    cases = [Case(name, kind, dtype="float32") for kind in ("padded", "packed")]
    for outcomes in four(2, over_a_ring, cases):
        for got, case in zip(outcomes, cases, strict=True):
            plain, exact = truth(case), truth(case._replace(dtype="float64"))
            for name, wanted in exact.items():
                if name == "logits":
                    assert relative_error(got[name], wanted) <= bound(plain[name], wanted, "float32")
            together = lambda outcome: np.concatenate([x.ravel() for name, x in sorted(outcome.items()) if name != "logits"])
            assert relative_error(together(got), together(exact)) <= bound(together(plain), together(exact), "float32")


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "llama4"])
def test_a_later_token_and_another_document_change_nothing(four: Any, name: str):
    plain, packed = Case(name, dtype="float32"), Case(name, "packed", dtype="float32")
    changed = sum(DOCUMENTS[:2])  # the first token of the last document
    for before, after in four(4, perturbed, plain, changed):
        assert np.array_equal(before[:, :changed], after[:, :changed])
        assert not np.array_equal(before[:, changed], after[:, changed])
    for before, after in four(4, perturbed, packed, DOCUMENTS[0] - 1):
        assert np.array_equal(before[:, DOCUMENTS[0] :], after[:, DOCUMENTS[0] :])
        assert not np.array_equal(before[:, DOCUMENTS[0] - 1], after[:, DOCUMENTS[0] - 1])


def perturbed(group: Any, case: Case, token: int) -> list[np.ndarray]:
    """The logits before and after one token is changed."""
    model, given = make(case.model, case.dtype, "ring"), batch(case)
    other = {**given, "input_ids": given["input_ids"].clone()}
    other["input_ids"][:, token] = (other["input_ids"][:, token] + 5) % 40
    with hf.sequence_parallel(model, group, case.layout, gather_logits=True), torch.no_grad():
        return [result_of(model(**each)).numpy() for each in (given, other)]


@pytest.mark.parametrize("kind", ["plain", "padded", "holes", "packed"])
@pytest.mark.parametrize("name", first(["llama", "llama4", "gemma2", "modernbert"], 2))
def test_one_process_needs_no_sequence_parallel(name: str, kind: str):
    """Check that transformers' arguments of the mask function say it all if nothing is sharded."""
    if kind == "packed" and name == "modernbert":
        pytest.skip("transformers tells masks of encoders nothing about documents, so eager attention does not part them either")
    case = Case(name, kind, dtype="float32")
    given = batch(case)
    given.pop("labels")
    eager, ring = (make(name, "float32", implementation) for implementation in ("eager", "ring"))
    present = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    with torch.no_grad():
        want, got = (model(**given, **({} if name == "modernbert" else {"use_cache": False})).logits for model in (eager, ring))
    assert relative_error(got[present].numpy(), want[present].numpy()) <= rounding_of(name, "float32")
