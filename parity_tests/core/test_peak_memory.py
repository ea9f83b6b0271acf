"""The formula for peak memory: published sizes, what grows with what, and how many tokens fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ring_attn_cli.main import app
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.llama import their_config
from ring_attn_core.model.memory import GIB, STEP, Training, longest, peak_memory, total, weights
from ring_attn_core.model.shapes import SHAPES, shape

PUBLISHED = {
    "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
}
"""The number of weights of each model on Hugging Face."""

EIGHT = Training(gpus=8, tokens=65_536)


def test_published_models_have_as_many_weights_as_published():
    assert {name: weights(shape(name)) for name in SHAPES} == PUBLISHED


def test_weights_and_moments_are_shared_by_all_gpus():
    """16 bytes a weight: a float32 weight, its gradient and two moments."""
    for gpus in (1, 3, 8):
        terms = {term.what: term.size for term in peak_memory(shape("llama-8b"), replace(EIGHT, gpus=gpus)).stays}
        sharded = terms["weights"] + terms["gradients"] + terms["moments"]
        assert 0 <= sharded - 16 * PUBLISHED["llama-8b"] / gpus < 16


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_kept_arrays_of_blocks_are_on_the_gpu_or_on_the_host(activations):
    shallow, deep = (replace(shape("llama-8b"), depth=depth) for depth in (8, 9))
    training = replace(EIGHT, activations=activations)
    less, more = (peak_memory(config, training) for config in (shallow, deep))
    block = 65_536 * (4096 * 2 + 4096 * 2 + 32 * 4)  # input, out, lse
    beside_weights = lambda memory: sum(term.size for term in memory.stays[6:])
    grown = beside_weights(more) - beside_weights(less)
    assert grown == {"recompute": block, "offload": 0}.get(activations, grown)
    assert total(more.host) - total(less.host) == (block if activations == "offload" else 0)
    if activations == "keep":
        saved = 65_536 * 2 * (3 * 4096 + 6144) + 65_536 * 8 * 128  # behind norms and their input, q k v, angles
        assert grown == block + saved


@pytest.mark.parametrize(("chunk", "of"), [("mlp_chunk", "backward of an MLP"), ("loss_chunk", "loss")])
def test_chunks_bound_what_the_mlp_and_the_loss_take(chunk, of):
    config = shape("llama-8b")
    sizes = {size: total(peak_memory(config, replace(EIGHT, **{chunk: size})).moments[of]) for size in (1024, 4096, 65_536, None)}
    assert sizes[1024] < sizes[4096] < sizes[65_536]
    assert abs(sizes[None] - sizes[65_536]) <= 1e-9 * sizes[None]
    assert sizes[None] > 2 * sizes[4096]


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("name", ["llama-8b", "qwen3-0.6b"])
def test_the_longest_fits_and_a_step_more_does_not(name, activations):
    config, training = shape(name), Training(gpus=4, tokens=1, activations=activations)
    for gib in (60, 141):
        tokens = longest(config, training, gib * GIB)
        assert tokens > 0 and tokens % STEP == 0
        peaks = [peak_memory(config, replace(training, tokens=tokens + more)).peak for more in (0, STEP)]
        assert peaks[0] <= gib * GIB < peaks[1]


def test_the_host_may_be_what_is_too_small():
    config, training = shape("llama-8b"), Training(gpus=8, tokens=1)
    alone, bounded = longest(config, training, 141 * GIB), longest(config, training, 141 * GIB, host=64 * GIB)
    assert bounded < alone
    assert total(peak_memory(config, replace(training, tokens=bounded)).host) <= 64 * GIB
    assert longest(config, training, 20 * GIB) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": 0}, "gpus must be an int of at least 1, got 0"),
        ({"tokens": 0.5}, "tokens must be an int of at least 1, got 0.5"),
        ({"mlp_chunk": 0}, "mlp_chunk must be an int of at least 1, got 0"),
        ({"activations": "discard"}, "activations must be one of keep, recompute, offload, got 'discard'"),
    ],
)
def test_a_training_that_cannot_be_is_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        replace(EIGHT, **arguments)


def plan(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "120"})


def test_plan_says_how_long_a_sequence_may_be():
    done = plan("--model", "llama-8b", "--gpus", "8", "--memory", "141")
    assert done.exit_code == 0, done.output
    most = longest(shape("llama-8b"), Training(gpus=8, tokens=1), 141 * GIB)
    assert f"at most {most:,} tokens a GPU, {8 * most:,} on 8" in done.output
    assert "on the GPU stay weights, gradients and moments" in done.output
    assert "on the host, for each GPU" in done.output


def test_plan_reads_a_config_and_says_whether_so_many_tokens_fit(tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(TransformerConfig(vocab=256, dim=64, depth=2, heads=4).to_json())
    small = "--model", str(file), "--gpus", "1", "--activations", "recompute", "--tokens"
    assert "4,096 tokens a GPU, 4,096 on 1 fit" in plan(*small, "4096").output
    assert "do not fit" in plan(*small, "40000000").output
    file.write_text(json.dumps(their_config(shape("llama-1b"), 4096)))
    done = plan("--model", str(file), "--gpus", "8", "--memory", "141")
    assert f"{weights(shape('llama-1b')):,} weights" in done.output
