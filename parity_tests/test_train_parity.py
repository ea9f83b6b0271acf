"""``ring-attn train``: JAX on four devices, PyTorch on four ranks and on one take the same steps, and a stopped run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file

from ring_attn_cli.train import jax_worker
from ring_attn_cli.train.config import Config, Data, Evaluation, Optimizer, Passkeys, RingConfig
from ring_attn_cli.train.jax_worker import JaxTrainer, compiler_options, make_mesh
from ring_attn_cli.train.loop import lines, train
from ring_attn_cli.train.torch_worker import RankPlace, TorchTrainer
from ring_attn_torch.ring.groups import local

from .support import corpus
from .support.selection import first

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")


CLOSE = 1e-9
"""The largest relative difference of losses and norms in float64: it would grow with every step that differed."""


class Stopped(Exception):
    pass


def config_of(folder: Path, name: str, ranks: int, steps: int = 10) -> Config:
    """Ten steps with every part of a step: accumulation, clipping, warm-up, decay, dropout, a step that learns passkeys."""
    corpus.write_texts(folder / "data", (700, 61, 1, 900, 100, 3, 1300))
    model = {"vocab": 256, "dim": 16, "depth": 1, "heads": 2, "kv_heads": 1, "hidden": 24, "qk_norm": True, "qkv_bias": True}
    return Config(
        out=str(folder / name),
        steps=steps,
        save_every=4,
        model=model | {"tied": False, "sinks": True, "alibi": True, "dropout_rate": 0.1, "param_dtype": "float64"},
        data=Data(folder=str(folder / "data"), pattern="**/*.txt", held_out="**/*.txt", length=120, batch_size=2, accumulate=2),
        optimizer=Optimizer(learning_rate=1e-2, warmup=3, clip=1.5),
        ring=RingConfig(ranks=ranks, chunk=20),
        evaluation=Evaluation(every=5, batches=1, buckets=3),
        passkey=Passkeys(lengths=(131,), texts=3, digits=2, train_every=3),
    )


def stop_before(trainer: Any, step: int) -> None:
    """Let step ``step``, from 0, raise Stopped in each process, after the checkpoints before it are complete; 0: never."""
    make_step = trainer.step

    def limited(number: int, microbatches: list[Any]) -> Any:
        if number == step > 0:
            trainer._checkpoints.close()
            raise Stopped
        return make_step(number, microbatches)

    trainer.step = limited


def on_ranks(group: Any, config: Config, stop: int = 0) -> None:
    """Train as one rank; ``stop``: the number of steps after which it is stopped, or 0."""
    trainer = TorchTrainer(config, RankPlace(group, group, 0, torch.device("cpu")))
    stop_before(trainer, stop)
    train(config, trainer, lambda kind, line: None)


def in_jax(config: Config, stop: int = 0) -> None:
    with jax.enable_x64(True):
        trainer = JaxTrainer(config, make_mesh(config))
        stop_before(trainer, stop)
        train(config, trainer, lambda kind, line: None)


def numbers(config: Config) -> dict[str, np.ndarray]:
    """Everything that a run has logged of what it learned."""
    found = lines(Path(config.out, "log.jsonl"))
    of = {kind: [line for line in found if line["kind"] == kind] for kind in ("step", "evaluation", "passkey")}
    by_position = [[x or 0 for x in line["by_position"]] for line in of["evaluation"]]
    return {
        "losses": np.array([line["loss"] for line in of["step"]]),
        "norms": np.array([line["norm"] for line in of["step"]]),
        "held out": np.array([line["loss"] for line in of["evaluation"]]),
        "by position": np.array(by_position),
        "passkeys": np.array([line["accuracy"] for line in of["passkey"]]),
    }


def weights(config: Config) -> dict[str, np.ndarray]:
    return load_file(Path(config.out, "weights", "model.safetensors"))


def assert_close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        np.testing.assert_allclose(ours[name], x, rtol=CLOSE, atol=CLOSE, err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_steps_are_the_same_on_four_ranks_of_either_framework_and_on_one(gloo, tmp_path: Path):
    one, four, ours = (config_of(tmp_path, name, ranks) for name, ranks in (("one", 1), ("four", 4), ("jax", 4)))
    gloo(1, on_ranks, one)
    gloo(4, on_ranks, four)
    in_jax(ours)
    truth = numbers(one)
    assert len(truth["losses"]) == 10 and truth["by position"].shape == (2, 3) and len(truth["passkeys"]) == 2
    assert truth["norms"].min() < one.optimizer.clip < truth["norms"].max()  # some steps are clipped
    for config in (four, ours):
        assert_close(numbers(config), truth)
        assert_close(weights(config), weights(one))


@pytest.mark.exhaustive
def test_steps_of_a_hybrid_are_the_same_in_both_frameworks(gloo, tmp_path: Path):
    runs = []
    for framework in ("torch", "jax"):
        config = config_of(tmp_path, framework, 2, 5)
        model = {name: config.model[name] for name in ("vocab", "dim", "heads", "kv_heads", "hidden", "param_dtype")}
        mixers = ["gated_delta_net", "mamba2", "attention"]
        config = replace(config, model=model | {"depth": 3, "mixers": mixers})
        work(framework, gloo, config)
        runs.append(config)
    assert_close(*map(numbers, runs))
    assert_close(*map(weights, runs))


def on_two_ranks(folder: Path, name: str) -> Config:
    """Six steps on two ranks, on the rows of a file, with a checkpoint every other step and rates that rise, stay and fall."""
    config = config_of(folder, name, 2, 6)
    texts = [path.read_text() for path in sorted(Path(config.data.folder).rglob("*.txt"))]
    Path(config.data.folder, "texts.jsonl").write_text("".join(json.dumps({"content": text}) + "\n" for text in texts))
    data = replace(config.data, pattern="*.jsonl", held_out="*.jsonl", column="content")
    optimizer = replace(config.optimizer, schedule="wsd", warmup=2, cooldown=0.5)
    return replace(config, data=data, optimizer=optimizer, save_every=2, evaluation=replace(config.evaluation, every=4))


def work(framework: str, gloo, config: Config, stop: int = 0) -> None:
    in_jax(config, stop) if framework == "jax" else gloo(config.ring.ranks, on_ranks, config, stop)


@pytest.fixture(scope="module")
def finished(gloo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Config]:
    """A function that trains ``on_two_ranks`` in a framework, once, and returns its config."""

    @cache
    def train_once(framework: str) -> Config:
        config = on_two_ranks(tmp_path_factory.mktemp(framework), "finished")
        work(framework, gloo, config)
        return config

    return train_once


@pytest.mark.slow
@pytest.mark.parametrize("framework", first(["torch", "jax"]))
def test_a_run_in_a_balanced_layout_takes_the_steps_of_one_in_zigzag(framework: str, finished, gloo, tmp_path: Path):
    zigzag, balanced = finished(framework), on_two_ranks(tmp_path, "balanced")
    balanced = replace(balanced, ring=replace(balanced.ring, layout="balanced"))
    work(framework, gloo, balanced)
    assert len(numbers(zigzag)["losses"]) == 6
    assert_close(numbers(balanced), numbers(zigzag))
    assert_close(weights(balanced), weights(zigzag))


@pytest.mark.slow
@pytest.mark.parametrize("framework", first(["torch", "jax"]))
def test_a_run_with_sharded_weights_takes_the_steps_of_one_with_whole_weights(framework: str, finished, gloo, tmp_path: Path):
    """Its checkpoint of step 2 resumes with sharded weights, and that of step 4, after an evaluation, with whole weights."""
    expected, resumed = finished(framework), on_two_ranks(tmp_path, "sharded")
    sharded = replace(resumed, ring=replace(resumed.ring, weights="sharded"))
    for stop in (3, 5):
        with pytest.raises(Stopped):
            work(framework, gloo, sharded, stop)
    work(framework, gloo, resumed)
    assert_close(numbers(resumed), numbers(expected))
    assert_close(weights(resumed), weights(expected))


def share_in_torch(group: Any, config: Config) -> float:
    """The share of the weights that this rank holds."""
    model = TorchTrainer(config, RankPlace(group, group, 0, torch.device("cpu")))._model
    held, of = (sum(x.numel() for x in xs) for xs in (map(local, model.parameters()), model.parameters()))
    return held / of


def test_each_rank_holds_its_share_of_sharded_weights(gloo, tmp_path: Path):
    config = config_of(tmp_path, "run", 2)
    config = replace(config, ring=replace(config.ring, weights="sharded"))
    assert max(gloo(2, share_in_torch, config)) < 0.51
    with jax.enable_x64(True):
        arrays = jax.tree.leaves(nnx.state(JaxTrainer(config, make_mesh(config))._model, nnx.Param))
    assert sum(x.addressable_shards[0].data.size for x in arrays) / sum(x.size for x in arrays) < 0.51


@pytest.mark.slow
@pytest.mark.parametrize("framework", first(["torch", "jax"]))
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(framework: str, finished, gloo, tmp_path: Path):
    whole, stopped = finished(framework), on_two_ranks(tmp_path, "stopped")
    with pytest.raises(Stopped):
        work(framework, gloo, stopped, 5)
    assert not Path(stopped.out, "weights").exists()
    work(framework, gloo, stopped)
    assert [line["step"] for line in lines(Path(stopped.out, "log.jsonl")) if line["kind"] == "step"] == list(range(1, 7))
    for name, x in numbers(whole).items():
        np.testing.assert_array_equal(numbers(stopped)[name], x, err_msg=name)
    for name, x in weights(whole).items():
        np.testing.assert_array_equal(weights(stopped)[name], x, err_msg=name)


def test_a_truncated_checkpoint_is_named(finished, gloo, tmp_path: Path):
    config = replace(finished("torch"), out=str(tmp_path / "run"), steps=7)
    copytree(finished("torch").out, config.out)
    for file in Path(config.out, "checkpoints", "step-000000006").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"step-000000006.*truncated"):
        work("torch", gloo, config)


@pytest.mark.exhaustive
def test_offload_on_gpus_is_compiled_without_the_scheduler_that_undoes_it(tmp_path: Path, monkeypatch):
    asked, found = [], {(p, a): compiler_options(p, a) for p in ("cpu", "gpu", "tpu") for a in ("keep", "recompute", "offload")}
    assert {of for of, options in found.items() if options is not None} == {("gpu", "offload")}
    assert found["gpu", "offload"] == {"xla_gpu_enable_latency_hiding_scheduler": False}

    def options(platform: str, activations: str) -> dict[str, bool]:
        asked.append((platform, activations))
        return {"xla_no_such_option": False}  # which XLA names, so it was given what this returns

    monkeypatch.setattr(jax_worker, "compiler_options", options)
    config = config_of(tmp_path, "run", 1, 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        in_jax(replace(config, ring=replace(config.ring, activations="offload")))
    assert asked == [("cpu", "offload")]


@pytest.mark.exhaustive
def test_weights_of_one_framework_begin_a_run_of_the_other(finished, tmp_path: Path):
    config = finished("torch")
    begin = {"init_from": str(Path(config.out, "weights")), "model": {}, "passkey": Passkeys(lengths=())}
    more = replace(config, out=str(tmp_path / "more"), **begin, steps=1, optimizer=Optimizer(learning_rate=1e-30))
    in_jax(more)
    assert_close(weights(more), weights(config))
