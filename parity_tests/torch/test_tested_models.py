"""The page of tested models: classes that are exact over a ring, and classes that are refused by name."""

from __future__ import annotations

import pytest

from benchmarks.hugging_face import tested_models as models
from benchmarks.hugging_face.tested_models import EXACT, Verdict, page

CLASSES = {"LlamaForCausalLM": "exact", "BertForMaskedLM": "exact", "MobileBertForMaskedLM": "refused"}


@pytest.mark.exhaustive
def test_a_class_is_exact_or_refused_by_name_and_the_page_says_so():
    found = {each.model: each for each in models.verdicts(CLASSES, 120)}
    assert {name: each.verdict for name, each in found.items()} == CLASSES, found
    assert all(0 < each.error <= EXACT for each in found.values() if each.error is not None)
    assert "MobileBertForMaskedLM mixes tokens by MobileBertEmbeddings" in found["MobileBertForMaskedLM"].words
    lines = page([*found.values()], 3).splitlines()[-3:]
    assert [line.split(" | ")[0] for line in lines] == [f"| {name}" for name in CLASSES]


def test_a_gradient_that_differs_or_is_missing_is_an_error():
    torch = pytest.importorskip("torch")
    right = {"logits": torch.ones(3), "weight": torch.ones(4)}
    assert models._largest_error(right, right)[0] == 0
    assert models._largest_error(right | {"weight": torch.tensor([1, 1, 1, 1.1])}, right) == (pytest.approx(0.05), "weight")
    assert models._largest_error({"logits": torch.ones(3)}, right) == (1, "weight")
    assert models._largest_error(right | {"unused": torch.zeros(2)}, right)[0] == 0
    assert models._largest_error(right | {"unused": torch.ones(2)}, right)[1] == "unused"
    assert models._largest_error(right | {"logits": torch.tensor([1, 1, float("nan")])}, right) == (float("inf"), "logits")


def test_every_line_of_the_page_is_short():
    found = [Verdict("A" * 30, "refused", "[a] | b " * 40), Verdict("B", "exact", "", 1e-7)]
    lines = page(found, 2).splitlines()
    assert max(map(len, lines)) <= 140
    assert all(line.count("|") == 4 for line in lines[-2:])
