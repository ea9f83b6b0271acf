"""A run's folder: the checks before training, of its checkpoints and changes of the config, and its lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ring_attn_core.files import read_json
from ring_attn_core.model.checkpoint_folder import RUN, CheckpointFolder
from ring_attn_core.model.folder_lock import LOCK, FolderLock

from .config import Config

CHECKPOINTS = "checkpoints"
NAMES = {"torch": "step-{:09}", "jax": "step_{}"}
"""Name pattern of a checkpoint's folder, by the framework that writes it."""
MARKS = RUN, "run/metadata"
"""A complete checkpoint has one of these files; the second was written by earlier versions of the JAX package."""


def newest(config: Config, framework: str) -> int:
    return max(_checkpoints(config, framework).steps(), default=0)


def check(config: Config, framework: str) -> None:
    """Check that ``config.out`` can hold this run, and create it if it does not exist.
    Refuse checkpoints of the other framework, and those of a run with another ``[lora]`` table."""
    if not config.out:
        raise ValueError("out is empty: pass the folder of the run, or leave it out for train-output")
    if Path(config.out).exists() and not Path(config.out).is_dir():
        raise ValueError(f"out = {config.out!r} is a file: pass a folder, or a name that does not exist yet")
    if (framework, config.ring.order, config.ring.layout) == ("jax", "global", "balanced"):
        raise ValueError('ring.order = "global" runs no balanced layout in JAX: take another ring.layout, or --framework torch')
    for other in set(NAMES) - {framework}:
        if newest(config, other):
            raise ValueError(
                f"{config.out} holds a run of {other}: go on with --framework {other}, or begin another with --out FOLDER, "
                f"from its weights with init_from = {str(Path(config.out, 'weights'))!r} if need be"
            )
    _check_lora(config, framework)
    try:
        Path(config.out).mkdir(parents=True, exist_ok=True)
        Path(config.out, LOCK).open("a").close()
    except OSError as error:
        raise ValueError(f"out = {config.out!r} cannot be written ({error.strerror}): pass another --out FOLDER") from error


def _check_lora(config: Config, framework: str) -> None:
    """Raise ValueError if the newest checkpoint has another ``[lora]``; a damaged one passes: ``resume`` names the damage."""
    step = newest(config, framework)
    if not step:
        return
    try:
        before = read_json(_checkpoints(config, framework).where(step) / RUN).get("more", {}).get("lora")
    except (OSError, ValueError, AttributeError):
        return
    if changed := differences({"lora": before}, extract_lora(config)):
        raise ValueError(
            f"{config.out} holds a run with another [lora], which its weights depend on: {'; '.join(changed)}. Put it back, or "
            "begin another run with --out FOLDER"
        )


def extract_lora(config: Config) -> dict[str, Any]:
    """Return ``{"lora": table}`` for a checkpoint. ``table``: the table ``[lora]``, or None without adapters."""
    return {"lora": config.to_dict()["lora"]}


def _checkpoints(config: Config, framework: str) -> CheckpointFolder:
    return CheckpointFolder(Path(config.out, CHECKPOINTS), NAMES[framework], MARKS)


def differences(before: dict[str, Any], now: dict[str, Any], table: str = "") -> list[str]:
    """Return the changes between two configs except those of ``out``, one line each: "optimizer.clip was 1.0 and is 0.5"."""
    found = []
    for name in sorted(before.keys() | now.keys()):
        old, new, key = before.get(name), now.get(name), f"{table}{name}"
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{key}.")
        elif old != new and key != "out":
            found.append(f"{key} was {old} and is {new}")
    return found


@contextmanager
def hold(config: Config, first: bool = True, share: Callable[[str], str] = str) -> Iterator[None]:
    """Lock the folder of a run until the block ends, because a second run would overwrite its files.
    ``first``: True in the one process that locks. ``share``: returns the first process's text in each process. The system
    releases the lock of a killed process; on a file system without locks nothing keeps other runs out."""
    lock, objection, out = None, "", Path(config.out)
    if first:
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(out, "trains there", "pass another --out FOLDER")
        except ValueError as error:
            objection = str(error)
        except OSError as error:
            objection = f"{out / LOCK} cannot be written ({error.strerror}): pass another --out FOLDER"
    try:
        if objection := share(objection):
            raise ValueError(objection)
        yield
    finally:
        if lock is not None:
            lock.forget()
