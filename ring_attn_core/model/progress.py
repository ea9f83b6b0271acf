"""The progress of a training run, and its checks. Checkpoints of both packages store the progress beside the arrays."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from ..validation import in_words
from .config import TransformerConfig
from .weight_names import check_state

MAY_CHANGE = "compute_dtype", "dropout_rate", "published"
"""Fields of a config that a resumed run may change: they affect neither weights nor the meaning of a trained model."""

ITEMS = "(keys and values)"
"""The key under which JSON stores the items of a dict whose keys are not all texts, such as MultiStepLR's milestones."""

Kinds = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of arrays, by name."""


class ResumePoint(NamedTuple):
    """The point from which a run resumes: ``step`` steps made, the dataset's state ``data``, and the user's own dict ``more``."""

    step: int
    data: str | None
    more: dict[str, Any]


def write_run(progress: ResumePoint, config: TransformerConfig | None) -> dict[str, Any]:
    """Return the contents of a checkpoint's run.json, in types that JSON can hold."""
    step, data, more = progress
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step must be an int of at least 0, how many steps the run has made, got {in_words(step)}")
    if data is not None and not isinstance(data, str):
        raise ValueError(f"data must be the text that the dataset's state() returns, or None, got {in_words(data)}")
    if not isinstance(more, dict):
        raise ValueError(f"more must be a dict that JSON can hold, got {in_words(more)}")
    try:
        more = json.loads(json.dumps(_pack(more)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"more must be a dict that JSON can hold, numbers and texts: {error}") from error
    return {"step": step, "data": data, "more": more, "config": None if config is None else json.loads(config.to_json())}


def progress_of(where: Path, found: Any, config: TransformerConfig | None) -> ResumePoint:
    """Return the progress in the parsed run.json ``found``. Its config may differ from ``config`` only in ``MAY_CHANGE``."""
    if not isinstance(found, dict):
        raise ValueError(
            f"{where} must hold a JSON object, got a {type(found).__name__}: it is not a checkpoint, or a damaged one"
        )
    lacking = [name for name in ("step", "data", "more", "config") if name not in found]
    if lacking:
        raise ValueError(f"{where} says nothing of {', '.join(lacking)}: it is not a checkpoint, or is damaged")
    step, data, more, theirs = (found[name] for name in ("step", "data", "more", "config"))
    for name, value, fits, expected in (
        ("step", step, type(step) is int and step >= 0, "an int of at least 0"),
        ("data", data, data is None or isinstance(data, str), "a text or null"),
        ("more", more, isinstance(more, dict), "an object"),
        ("config", theirs, theirs is None or isinstance(theirs, dict), "an object or null"),
    ):
        if not fits:
            raise ValueError(f"{name} in {where} must be {expected}, got {in_words(value)}: the checkpoint is damaged")
    mine = None if config is None else json.loads(config.to_json())
    if theirs is not None and mine is not None:
        theirs = {x.name: x.default for x in fields(TransformerConfig) if x.name in mine} | theirs  # older releases wrote fewer
        names = [name for name in {**mine, **theirs} if name not in MAY_CHANGE and theirs.get(name) != mine.get(name)]
        if names:
            listed = "; ".join(f"{name} is {theirs.get(name)!r} there and {mine.get(name)!r} here" for name in names)
            raise ValueError(f"{where} is of another model: {listed}. Make the model as it was, or give this run another folder")
    try:
        return ResumePoint(step, data, _unpack(more))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"more in {where} cannot be read ({error}): the checkpoint is damaged") from error


def check_arrays(where: Path, expected: Kinds, found: Kinds) -> None:
    remedy = "Make the model and the optimizer as they were, or give this run another folder"
    mine, theirs = ({name: shape for name, (_, shape) in kinds.items()} for kinds in (expected, found))
    check_state(mine, theirs, f"what {where} holds", remedy, most=8)
    other = [f"{name} is {found[name][0]} and must be {x}" for name, (x, _) in expected.items() if found[name][0] != x]
    if other:
        more = f"; and {len(other) - 8} more" if len(other) > 8 else ""
        raise ValueError(f"what {where} holds does not fit this module: {'; '.join(other[:8])}{more}. {remedy}")


def check_next(step: int, steps: list[int], folder: Path) -> None:
    if steps and step <= max(steps):
        raise ValueError(
            f"step {step} is not after step {max(steps)}, of which {folder} has a checkpoint: resume from it, delete it to go "
            "back, or give this run another folder"
        )


def check_keep(keep: int) -> None:
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep must be an int of at least 1, how many checkpoints stay, got {in_words(keep)}")


def _pack(x: Any) -> Any:
    """Convert ``x`` to a form in which JSON preserves dicts with numbers as keys."""
    if isinstance(x, list | tuple):
        return [_pack(each) for each in x]
    if not isinstance(x, dict):
        return x
    strange = [key for key in x if not isinstance(key, str | int | float | None)]
    if strange:
        raise TypeError(f"the key {in_words(strange[0])} is neither a text nor a number")
    if ITEMS not in x and all(isinstance(key, str) for key in x):
        return {key: _pack(value) for key, value in x.items()}
    return {ITEMS: [[key, _pack(value)] for key, value in x.items()]}


def _unpack(x: Any) -> Any:
    """Convert the result of ``_pack`` back to its argument, except that tuples become lists."""
    if isinstance(x, list):
        return [_unpack(each) for each in x]
    if not isinstance(x, dict):
        return x
    if isinstance(x.get(ITEMS), list):
        return {key: _unpack(value) for key, value in x[ITEMS]}
    return {key: _unpack(value) for key, value in x.items()}
