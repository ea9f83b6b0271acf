"""TensorBoard's events of a run hold every number of its log, and those of a resumed run replace what it repeats."""

from __future__ import annotations

import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ring_attn_cli.train import events
from ring_attn_cli.train.loop import Log

STEP = {"loss": 2.0, "norm": 1.5, "rate": 1e-3, "tokens_per_second": 9e4, "tflops": 0.5, "mfu": None, "memory": 5 << 30}


def write(folder: Path, begin: int, steps: range, scale: float = 1.0) -> None:
    log = Log(folder / "log.jsonl", begin, lambda kind, line: None)
    log("run", step=begin, parameters=3)
    for step in steps:
        log("step", step=step, **STEP | {"loss": scale * step})
        log("evaluation", step=step, loss=3.0, ends=[1, 2], by_position=[None, 2.5], labels=[0, 3])
        log("passkey", step=step, length=256, accuracy=0.25)


class Writer:
    """A stand-in for the SummaryWriter of torch.utils.tensorboard; ``flushed`` counts the numbers that are on the disk."""

    made: list[Writer]

    def __init__(self, log_dir: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.scalars, self.flushed = log_dir, purge_step, [], 0
        Writer.made.append(self)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((step, tag, value))

    def flush(self) -> None:
        self.flushed = len(self.scalars)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    """The writers that are made, in place of those of torch."""
    Writer.made = []
    for name in ("torch", "torch.utils", "torch.utils.tensorboard", "tensorboard"):
        module: Any = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.SummaryWriter = Writer
        monkeypatch.setitem(sys.modules, name, module)
    return Writer.made


def test_every_number_of_the_log_is_an_event_on_the_disk(made: list[Writer], tmp_path: Path):
    write(tmp_path, 0, range(1, 3))
    (writer,) = made
    names = {"loss", "gradient_norm", "learning_rate"}
    expected = {f"train/{name}" for name in names} | {"speed/tokens_per_second", "speed/tflops", "speed/memory_bytes"}
    expected |= {"held_out/loss", "held_out/loss_up_to_position_2", "passkey/found_in_256_tokens"}
    assert {(step, tag) for step, tag, _ in writer.scalars} == {(step, tag) for step in (1, 2) for tag in expected}
    values = {tag: value for step, tag, value in writer.scalars if step == 2}
    assert (values["train/loss"], values["speed/memory_bytes"], values["train/learning_rate"]) == (2.0, 5 << 30, 1e-3)
    assert writer.folder == str(tmp_path / "tensorboard") and writer.flushed == len(writer.scalars)


def test_a_resumed_run_begins_a_file_that_drops_what_it_repeats(made: list[Writer], tmp_path: Path):
    write(tmp_path, 0, range(1, 6))
    write(tmp_path, 3, range(4, 7), scale=10.0)
    assert [writer.purge_step for writer in made] == [1, 4]
    assert [(step, x) for step, tag, x in made[1].scalars if tag == "train/loss"] == [(4, 40.0), (5, 50.0), (6, 60.0)]


@pytest.mark.parametrize("missing", [["tensorboard"], ["torch"], ["torch", "tensorboard"]], ids=" ".join)
def test_a_run_without_tensorboard_writes_its_log_and_says_what_to_install(missing: list[str], tmp_path: Path, monkeypatch):
    monkeypatch.setattr(events, "find_spec", lambda name: None if name in missing else name)
    write(tmp_path, 0, range(1, 3))
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    assert f"run pip install {' '.join(missing)} " in events.explain_missing()


def test_tensorboard_reads_a_run_that_was_resumed(tmp_path: Path):
    pytest.importorskip("torch")
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard to read them"
    )
    write(tmp_path, 0, range(1, 6))
    write(tmp_path, 3, range(4, 7), scale=10.0)
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"]) for line in logged if line["kind"] == "step"]
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == losses
    assert len(losses) == 6 and losses[-1] == (6, 60.0)
