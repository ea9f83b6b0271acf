"""The records of measured machines, as files in the user's cache folder, and a count of the ranks on each host.

``ring-attn doctor --measure`` writes one file for each framework and kind of device; ``strategy="auto"`` on GPUs reads this file.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..files import read_bytes
from .machine import Machine

AGAIN = "run ring-attn doctor --measure again, or delete the file"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Hardware(NamedTuple):
    """A rank's measured speed or None, consecutive ranks per host (0: unknown), and whether ranks can copy between GPUs."""

    machine: Machine | None = None
    host_ranks: int = 0
    peer_access: bool = False


def path_of(framework: str, device: str) -> Path:
    """Return the path of the record of a kind of device, such as ``~/.cache/ring-attn/torch-NVIDIA-H200.json``."""
    return Path.home() / ".cache" / "ring-attn" / f"{framework}-{re.sub('[^A-Za-z0-9.]+', '-', device)}.json"


def check_folder() -> None:
    """Make the folder of the records, and write and delete a file in it, to find errors before a long measurement."""
    folder = path_of("", "").parent
    part = folder / f".{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.touch()
        part.unlink()
    except OSError as error:
        raise _unwritable(folder, error) from error


def save(machine: Machine, framework: str) -> Path:
    """Write a record atomically and return its path: write a temporary file in the same folder, then rename it."""
    path = path_of(framework, machine.name)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(machine.to_json() + "\n")
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def _unwritable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"{path} cannot be written ({error.strerror or error}): make its folder writable")


def stored(framework: str, device: str) -> Machine | None:
    """Return the record of a kind of device, or None if its file does not exist or the user has no home folder."""
    try:
        path = path_of(framework, device)
    except RuntimeError:  # the user has no home folder
        return None
    try:
        return Machine.from_json(read_bytes(path).decode()) if path.exists() else None
    except (OSError, ValueError) as error:
        raise ValueError(f"the record of this machine, {path}, cannot be read: {error}; {AGAIN}") from error


def host() -> str:
    """Return a name that tells this host from others: its network name and, on Linux, the id of its last boot."""
    try:
        return f"{platform.node()} {_BOOT.read_text().strip()}"
    except OSError:
        return platform.node()


def ranks_of_a_host(hosts: Sequence[str]) -> int:
    """Return the number of consecutive ranks on each host; 0 if it differs or the ranks of a host are not consecutive."""
    size = next((rank for rank, each in enumerate(hosts) if each != hosts[0]), len(hosts))
    groups = [set(hosts[first : first + size]) for first in range(0, len(hosts), size)]
    each_alone = len(set(hosts)) == len(groups) and all(len(group) == 1 for group in groups)
    return size if each_alone and len(hosts) % size == 0 else 0
