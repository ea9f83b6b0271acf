"""A worker of ``workers.py``: it compiles the kernels that stdin names, one after the other, and frees the lock of each."""

from __future__ import annotations

import os
import pickle
import sys

from .compile import compile_here
from .workers import unlock


def main() -> None:
    """Read the kernels with their locks, and Triton's cache folder, from stdin; compile the kernels into that folder."""
    from triton import knobs

    jobs, knobs.cache.dir = pickle.load(sys.stdin.buffer)
    for _, lock in jobs:
        os.set_inheritable(lock, False)  # Triton's assembler would keep the lock of a killed worker
    for spec, lock in jobs:
        compile_here(spec)
        unlock(lock)
