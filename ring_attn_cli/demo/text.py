"""The text of the demo: the source of Python's standard library, one token per byte."""

from __future__ import annotations

import sysconfig
from pathlib import Path

VOCAB = 256


def standard_library(length: int) -> bytes:
    """Return the first ``length`` bytes of the standard library's top-level modules, in order of their names.

    Repeat the text if it is too short. Raise ValueError if Python is installed without these sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        if len(text) < length:
            text += path.read_bytes()
    if not text:
        raise ValueError(f"the demo reads the source of Python's standard library, and {folder} has none: use another Python")
    return bytes(text * (length // len(text) + 1))[:length]
