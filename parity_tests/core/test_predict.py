"""``ring-attn plan --gpus``: the predictions of the cost model, as they are printed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from ring_attn_cli.main import app
from ring_attn_cli.plan.cost import memory, seconds
from ring_attn_cli.plan.gpus import H200
from ring_attn_cli.plan.options import tokens
from ring_attn_cli.plan.predict import PredictOptions, load_of, problem_of
from ring_attn_core.problem.traffic import traffic

QUESTION = PredictOptions("zigzag", "causal", 64, 2**20, "H200", "32/8", 128, 8)


def plan(*arguments: str):
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["plan", *arguments])


def rows(text: str) -> dict[str, list[str]]:
    """The cells of the table by strategy."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return {line[0]: line[1:] for line in lines if len(line) > 3 and line[0] != "strategy"}


def test_times_bytes_and_memory_are_those_of_the_model():
    done = plan("--gpus", "64", "--length", "1M")
    assert done.exit_code == 0, done.output
    printed, problem = rows(done.output), problem_of(QUESTION)
    load = load_of(problem, 8)
    predicted = seconds("ring", load, H200)
    forward, backward = traffic(replace(problem, options=replace(problem.options, strategy="ring")))
    ideal = load.ideal(H200).both / predicted.both
    ms = [f"{each * 1e3:,.2f}" for each in predicted]
    gib = [f"{each / 2**30:.2f}" for each in (forward.bytes, backward.bytes, memory("ring", load))]
    assert printed["ring"] == [*ms, f"{ideal:.0%}", *gib]
    assert {"ring", "direct", "two_way", "gather", "ulysses", "Ulysses(ranks=8)", "TwoLevel(ranks=8)"} >= printed.keys()
    assert "64 ranks, 1,048,576 tokens, 16,384 a GPU" in done.output
    assert "8 hosts of 8 GPUs, NVIDIA H200" in done.output
    assert '"auto" takes ring: the GPUs of the ranks do not reach each other' in done.output


def test_a_machine_is_a_name_of_the_table_of_gpus():
    short = "--gpus", "4", "--length", "8K"
    ours = plan(*short, "--machine", "H100")
    assert "one host of 4 GPUs, NVIDIA H100" in ours.output
    assert rows(ours.output) != rows(plan(*short).output)


def test_push_is_predicted_for_gpus_of_one_host_and_taken():
    one, two = (plan("--gpus", gpus, "--length", "64K").output for gpus in ("8", "16"))
    assert "push" in rows(one) and '"auto" takes push: copy engines' in one
    assert "push" not in rows(two)


def test_a_machine_alone_predicts_for_eight_gpus():
    assert "one host of 8 GPUs" in plan("--machine", "H200").output


def test_a_model_gives_its_heads():
    of_model = plan("--machine", "H200", "--model", "llama-8b", "--length", "64K")
    assert of_model.output == plan("--machine", "H200", "--heads", "32/8", "--head-dim", "128", "--length", "64K").output
    assert "one layer" in of_model.output


def test_nothing_is_predicted_where_nothing_travels():
    done = plan("--gpus", "2", "--mask", "sliding_window:0")
    assert done.exit_code == 0, done.output
    assert "nothing travels" in done.output


@pytest.mark.parametrize(
    ("text", "count"), [("8192", 8192), ("-5", -5), ("128K", 131072), ("10M", 10485760), ("2 g", 2**31), (" 7 ", 7)]
)
def test_units_are_powers_of_two(text, count):
    assert tokens(text) == count


@pytest.mark.parametrize("text", ["", "10X", "1.5M", "M", "1e6"])
def test_a_length_that_is_not_a_number_is_refused(text):
    with pytest.raises(ValueError, match="is not a number of tokens such as 8192, 128K or 10M"):
        tokens(text)
    assert plan("--gpus", "4", "--length", text).exit_code == 2
