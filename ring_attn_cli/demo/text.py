"""The text of the demo: the source of Python's standard library, one token per byte."""

from __future__ import annotations

import sysconfig
from pathlib import Path

VOCAB = 256


def standard_library(length: int) -> bytes:
    """Return the first bytes of the standard library's top-level modules by name, repeated if they are too short."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        if len(text) < length:
            text += path.read_bytes()
    if not text:
        raise ValueError(f"the demo reads the source of Python's standard library, and {folder} has none: use another Python")
    return bytes(text * (length // len(text) + 1))[:length]
