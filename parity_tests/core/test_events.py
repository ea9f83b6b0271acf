"""TensorBoard events of a run hold every number of its log, and those of a resumed run replace what it repeats."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from ring_attn_cli.train.events import crc32c, record
from ring_attn_cli.train.loop import Log

STEP = {"loss": 2.0, "norm": 1.5, "rate": 1e-3, "tokens_per_second": 9e4, "tflops": 0.5, "mfu": None, "memory": 5 << 30}


def write(folder: Path, begin: int, steps: range, scale: float = 1.0) -> None:
    log = Log(folder / "log.jsonl", begin, lambda kind, line: None)
    log("run", step=begin, parameters=3)
    for step in steps:
        log("step", step=step, **STEP | {"loss": scale * step})
        log("evaluation", step=step, loss=3.0, ends=[1, 2], by_position=[None, 2.5], labels=[0, 3])
        log("passkey", step=step, length=256, accuracy=0.25)


def records(path: Path) -> list[bytes]:
    """Return the messages of a file, whose checksums must be right."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        found.append(data[12 : 12 + length])
        assert data[: 16 + length] == record(found[-1])
        data = data[16 + length :]
    return found


def fields(message: bytes) -> list[tuple[int, Any]]:
    """Return the fields of a protocol buffer: numbers, doubles, floats and bytes."""
    found = []
    while message:
        number, message = varint(message)
        kind = number & 7
        if kind == 0:
            value, message = varint(message)
        elif kind == 2:
            length, message = varint(message)
            value, message = message[:length], message[length:]
        else:
            size, code = (8, "<d") if kind == 1 else (4, "<f")
            value, message = struct.unpack(code, message[:size])[0], message[size:]
        found.append((number >> 3, value))
    return found


def varint(message: bytes) -> tuple[int, bytes]:
    value = 0
    for i, byte in enumerate(message):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, message[i + 1 :]
    raise ValueError("a number without an end")


def scalars(path: Path) -> list[tuple[int, str, float]]:
    found = []
    for message in records(path):
        event = dict(fields(message))
        for _, value in fields(event.get(5, b"")):
            of = dict(fields(value))
            found.append((event[2], of[1].decode(), of[2]))
    return found


def test_checksums_are_those_of_the_standard():
    # RFC 3720, B.4, and the check value of CRC-32C
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283


def test_every_number_of_the_log_is_an_event(tmp_path: Path):
    write(tmp_path, 0, range(1, 3))
    (path,) = (tmp_path / "tensorboard").iterdir()
    first = dict(fields(records(path)[0]))
    assert first[3] == b"brain.Event:2"
    found = scalars(path)
    names = {"loss", "gradient_norm", "learning_rate"}
    expected = {f"train/{name}" for name in names} | {"speed/tokens_per_second", "speed/tflops", "speed/memory_bytes"}
    expected |= {"held_out/loss", "held_out/loss_up_to_position_2", "passkey/found_in_256_tokens"}
    assert {(step, tag) for step, tag, _ in found} == {(step, tag) for step in (1, 2) for tag in expected}
    values = {tag: value for step, tag, value in found if step == 2}
    assert (
        values["train/loss"] == 2.0 and values["speed/memory_bytes"] == 5 << 30 and values["passkey/found_in_256_tokens"] == 0.25
    )
    assert math.isclose(values["train/learning_rate"], 1e-3, rel_tol=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, -1e300])
def test_numbers_that_float32_does_not_hold_are_written_too(value: float, tmp_path: Path):
    Log(tmp_path / "log.jsonl", 0, lambda kind, line: None)("step", step=1, **STEP | {"norm": value})
    (found,) = [x for _, tag, x in scalars(next((tmp_path / "tensorboard").iterdir())) if tag == "train/gradient_norm"]
    assert math.isnan(found) if math.isnan(value) else found == math.copysign(math.inf, value)


def test_a_resumed_run_begins_a_file_that_drops_what_it_repeats(tmp_path: Path):
    write(tmp_path, 0, range(1, 6))
    write(tmp_path, 3, range(4, 7), scale=10.0)
    _, second = sorted((tmp_path / "tensorboard").iterdir())
    start = dict(fields(records(second)[1]))
    assert (start[2], dict(fields(start[7]))) == (4, {1: 1})
    assert [(step, x) for step, tag, x in scalars(second) if tag == "train/loss"] == [(4, 40.0), (5, 50.0), (6, 60.0)]


def test_tensorboard_reads_a_run_that_was_resumed(tmp_path: Path):
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
