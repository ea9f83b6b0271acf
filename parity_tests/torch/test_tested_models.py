"""``ring-attn doctor --model``: classes that are exact over a ring, refused by name, wrong or unknown, and the page of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
from typer.testing import CliRunner

from ring_attn_cli.doctor import models
from ring_attn_cli.doctor.models import EXACT, Verdict, page
from ring_attn_cli.main import app

CLASSES = {
    "LlamaForCausalLM": "exact",
    "BertForMaskedLM": "exact",
    "MambaForCausalLM": "refused",
    "MobileBertForMaskedLM": "refused",
}


@pytest.mark.exhaustive
def test_a_class_is_exact_or_refused_by_name_and_both_files_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(models, "classes", lambda: list(CLASSES))
    made, table = tmp_path / "models.json", tmp_path / "models.md"
    done = CliRunner().invoke(app, ["doctor", "--model", "all", "--json", str(made), "--table", str(table)])
    assert done.exit_code == 0, done.output
    found = {each["model"]: each for each in json.loads(made.read_text())["models"]}
    assert {name: each["verdict"] for name, each in found.items()} == CLASSES, done.output
    assert all(0 < each["error"] <= EXACT for each in found.values() if each["verdict"] == "exact")
    assert "MambaForCausalLM mixes tokens by MambaMixer" in found["MambaForCausalLM"]["words"]
    assert [line.split(" | ")[0] for line in table.read_text().splitlines()[-4:]] == [f"| {name}" for name in CLASSES]


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
    lines = page({"transformers": "5.24.0", "date": "2026-11-27", "ranks": 2, "tokens": 37, "classes": 2}, found).splitlines()
    assert max(map(len, lines)) <= 140
    assert all(line.count("|") == 4 for line in lines[-2:])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "LlamaForCausalLMs"], "unknown --model 'LlamaForCausalLMs': pass all, or a causal or masked class"),
        (["--model", "LlamaForCausalLM", "--seconds", "0"], "--seconds must be above 0, got 0"),
        (["--model", "LlamaForCausalLM", "--seconds", "nan"], "--seconds must be above 0, got nan"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: str):
    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.parametrize("option", ["--json", "--table"])
def test_a_file_that_cannot_be_written_is_refused_before_a_model_is_tried(
    option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(models, "verdicts", lambda *_: pytest.fail("a model was tried"))
    for path, words in ((tmp_path / "absent" / "a", "there is no folder"), (tmp_path, "is a folder: name a file in it")):
        done = CliRunner().invoke(app, ["doctor", "--model", "LlamaForCausalLM", option, str(path)])
        assert done.exit_code == 2 and words in done.stderr, done.output
