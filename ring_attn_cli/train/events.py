"""TensorBoard events of a training run, written with the standard library: neither tensorboard nor a framework is needed.

A file of events is a sequence of records (TFRecord): length uint64, its checksum, the bytes of a message, their checksum, all
little-endian. A checksum is a CRC-32C, rotated by 15 bits, plus a constant. The message is tensorflow.Event, a protocol buffer
(tensorboard/compat/proto/event.proto), with the fields wall_time 1, step 2, file_version 3, summary 5 and session_log 7.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
VERSION = b"brain.Event:2"
"""The file_version in a file's first event. With this version, a START event of step n makes readers drop all events that they
have read for step n and later steps."""
START = 1
"""The value of tensorflow.SessionLog.START, the status in an event that marks a start of the run."""

TAGS = {
    "loss": "train/loss",
    "norm": "train/gradient_norm",
    "rate": "train/learning_rate",
    "tokens_per_second": "speed/tokens_per_second",
    "tflops": "speed/tflops",
    "mfu": "speed/mfu",
    "memory": "speed/memory_bytes",
}
"""Tags of a step's numbers, by their names in the log."""


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


TABLE = _table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of some bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def record(message: bytes) -> bytes:
    """Return a message framed as a TFRecord."""
    length = struct.pack("<Q", len(message))
    return length + _masked(length) + message + _masked(message)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(x: int) -> bytes:
    out = bytearray()
    while x > 0x7F:
        out.append(x & 0x7F | 0x80)
        x >>= 7
    return bytes([*out, x])


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _event(now: float, step: int, what: bytes) -> bytes:
    return record(b"\x09" + struct.pack("<d", now) + b"\x10" + _varint(step) + what)


def _summary(values: dict[str, float]) -> bytes:
    """Return the summary field of an event: for each value its tag (field 1) and its number (field 2, float32)."""
    parts = [_bytes(1, _bytes(1, tag.encode()) + b"\x15" + _float32(value)) for tag, value in values.items()]
    return _bytes(5, b"".join(parts))


def _float32(x: float) -> bytes:
    try:
        return struct.pack("<f", x)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, x))


def scalars(kind: str, line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) of each number that TensorBoard shows from a log line. ``kind``: kind of the line, such as "step"."""
    if kind == "step":
        yield from ((tag, line[name]) for name, tag in TAGS.items() if line.get(name) is not None)
    elif kind == "evaluation":
        yield "held_out/loss", line["loss"]
        known = zip(line["ends"], line["by_position"], strict=True)
        yield from ((f"held_out/loss_up_to_position_{end}", x) for end, x in known if x is not None)
    elif kind == "passkey":
        yield f"passkey/found_in_{line['length']}_tokens", line["accuracy"]


class Events:
    """A new file of events, one for each start of a run, for ``tensorboard --logdir``.
    ``begin``: the step to resume, or 0. Its second event has the status START and the step ``begin + 1``, so readers drop earlier
    files' events from there on."""

    def __init__(self, out: Path, begin: int) -> None:
        folder, now = out / FOLDER, time.time()
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        started = _bytes(7, b"\x08" + _varint(START))
        self._write(_event(now, 0, _bytes(3, VERSION)) + _event(now, begin + 1, started))

    def __call__(self, kind: str, line: dict[str, Any]) -> None:
        """Write the numbers of a log line as one event, if it has numbers that TensorBoard shows."""
        if values := dict(scalars(kind, line)):
            self._write(_event(time.time(), line["step"], _summary(values)))

    def _write(self, data: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(data)
