"""The kernels that a wheel ships compiled: the first call with one of them compiles nothing, whatever release of Triton there is.

``make release`` writes them (``ring_attn_cli/compile/ship.py``); a checkout has none. A file's name depends on everything that
changes the kernel's binary and on the kernels' sources, so a kernel of other sources is never found.
"""

from __future__ import annotations

import json
import lzma
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from .launch import Specialization

FOLDER = Path(__file__).parent / "shipped"
METADATA = "name", "num_warps", "num_ctas", "shared", "tensordesc_meta"
"""The attributes of Triton's metadata that a launch reads."""


class ShippedKernel(NamedTuple):
    """A compiled kernel with those attributes of Triton's ``CompiledKernel`` that launches read."""

    metadata: Any
    asm: dict[str, Any]


def load(spec: Specialization, sources: str) -> ShippedKernel | None:
    """Return the shipped kernel of these sources, or None if its file is missing or damaged."""
    try:
        text, _, cubin = lzma.decompress(_file(spec, sources).read_bytes()).partition(b"\0")
        found = json.loads(text)
        return ShippedKernel(SimpleNamespace(**{name: found[name] for name in METADATA}), {"ptx": found["ptx"], "cubin": cubin})
    except (OSError, lzma.LZMAError, ValueError, KeyError):
        return None


def save(spec: Specialization, sources: str, kernel: Any) -> int:
    """Write a kernel that Triton compiled, and return the bytes of its file."""
    found = {name: getattr(kernel.metadata, name, None) for name in METADATA} | {"ptx": kernel.asm["ptx"]}
    FOLDER.mkdir(exist_ok=True)
    return _file(spec, sources).write_bytes(lzma.compress(json.dumps(found).encode() + b"\0" + kernel.asm["cubin"], preset=9))


def _file(spec: Specialization, sources: str) -> Path:
    return FOLDER / f"{sha256(f'{spec!r} {sources}'.encode()).hexdigest()[:32]}.xz"
