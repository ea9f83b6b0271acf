"""The checks of a run's folder before the run: its newest checkpoint, the framework that wrote it, and config changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ring_attn_core.model.checkpoint_folder import RUN, CheckpointFolder

from .config import Config
from .lock import LOCK

CHECKPOINTS = "checkpoints"
NAMES = {"torch": "step-{:09}", "jax": "step_{}"}
"""Name patterns of a checkpoint, by the framework that writes it."""
MARKS = RUN, "run/metadata"
"""A complete checkpoint has one of these files; the second was written by earlier versions of the JAX package."""


def newest(config: Config, framework: str) -> int:
    """Return the step of the newest checkpoint of this framework, or 0."""
    return max(CheckpointFolder(Path(config.out, CHECKPOINTS), NAMES[framework], MARKS).steps(), default=0)


def check(config: Config, framework: str) -> None:
    """Make the folder of the run.

    Raise ValueError if it is a file, cannot be written, or holds checkpoints of the other framework, which ``framework`` cannot
    resume.
    """
    if not config.out:
        raise ValueError("out is empty: pass the folder of the run, or leave it out for train-output")
    if Path(config.out).exists() and not Path(config.out).is_dir():
        raise ValueError(f"out = {config.out!r} is a file: pass a folder, or a name that does not exist yet")
    for other in set(NAMES) - {framework}:
        if newest(config, other):
            raise ValueError(
                f"{config.out} holds a run of {other}: go on with --framework {other}, or begin another with --out FOLDER, "
                f"from its weights with init_from = {str(Path(config.out, 'weights'))!r} if need be"
            )
    try:
        Path(config.out).mkdir(parents=True, exist_ok=True)
        Path(config.out, LOCK).open("a").close()
    except OSError as error:
        raise ValueError(f"out = {config.out!r} cannot be written ({error.strerror}): pass another --out FOLDER") from error


def differences(before: dict[str, Any], now: dict[str, Any], table: str = "") -> list[str]:
    """Return the changes between two configs except ``out``, one line each: "optimizer.clip was 1.0 and is 0.5"."""
    found = []
    for name in sorted(before.keys() | now.keys()):
        old, new, key = before.get(name), now.get(name), f"{table}{name}"
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{key}.")
        elif old != new and key != "out":
            found.append(f"{key} was {old} and is {new}")
    return found
