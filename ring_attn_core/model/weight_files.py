"""Weights as a folder of safetensors files: finding them, writing them, and replacing such a folder whole or not at all.

The layout is Hugging Face's: ``config.json`` beside ``model.safetensors``, or beside ``model-00001-of-00002.safetensors`` and so
on with ``model.safetensors.index.json``, which says which weight stands in which file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any

from .config import TransformerConfig
from .weight_names import check_state

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

MOST_BYTES = 5 * 10**9
"""Weights beyond this begin another file: a process that saves holds those of one file in host memory."""

SAVING, REPLACED = ".{}.saving", ".{}.replaced"
"""What the folder ``{}`` is called while it is written, and while a new one takes its place."""

DTYPES = "F32", "BF16", "F16", "F64"
"""What safetensors calls the dtypes that weights may be stored in."""

Save = Callable[[dict[str, Any], Path, dict[str, str]], None]
"""``save_file`` of safetensors for a framework: arrays by name, where to, and the header's texts."""


@contextmanager
def replacing(folder: str | Path) -> Iterator[Path]:
    """Yield an empty folder, beside ``folder``, that takes its place when the block ends: all of it or, after an error, nothing.

    A process that is killed in here leaves the previous folder whole, for ``current`` to find. Raises ValueError, before the
    block, for a folder that holds anything but weights, and OSError, which says that nothing was lost, for one that cannot be
    written.
    """
    from safetensors import SafetensorError

    folder = Path(folder).resolve()
    new, old = (folder.with_name(name.format(folder.name)) for name in (SAVING, REPLACED))
    _check_replaceable(folder)
    try:
        _settle(folder, old)
        rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        for path in (*new.iterdir(), new):
            to_disk(path)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        to_disk(folder.parent)
        rmtree(old, ignore_errors=True)
    except BaseException as error:
        _settle(folder, old)
        rmtree(new, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise OSError(f"{folder} could not be saved, and what was there before is as it was: {error}") from error
        raise


def current(folder: str | Path) -> Path:
    """Return the folder itself or, where a save was killed between its two renames, the one that it was about to replace.

    Raises ValueError where there is neither.
    """
    folder = Path(folder).resolve()
    old = folder.with_name(REPLACED.format(folder.name))
    if folder.is_dir() or not old.is_dir():
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: pass one with {CONFIG} and {WEIGHTS} in it")
        return folder
    return old


def write(folder: Path, weights: Iterable[tuple[str, Any]], save_file: Save) -> None:
    """Write the arrays into the empty ``folder``, in as many files as it takes; ``weights`` is read one file at a time."""
    files: list[list[str]] = []
    part: dict[str, Any] = {}
    total = 0
    temporary = lambda number: folder / f"{number}.part"

    def finish() -> None:
        save_file(part, temporary(len(files)), {"format": "pt"})  # what transformers looks for; says nothing about the layout
        temporary(len(files)).chmod(folder.stat().st_mode & 0o666)  # safetensors lets nobody else read it
        files.append(list(part))
        part.clear()

    for name, x in weights:
        if part and sum(each.nbytes for each in part.values()) + x.nbytes > MOST_BYTES:
            finish()
        part[name] = x
        total += x.nbytes
    finish()
    if len(files) == 1:
        temporary(0).rename(folder / WEIGHTS)
        return
    of: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        temporary(number).rename(folder / file)
        of |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": of}, indent=2))


def sources(
    folder: Path, expected: Mapping[str, tuple[int, ...]], renamed: Callable[[str], str], ignored: Iterable[str] = ()
) -> dict[Path, dict[str, str]]:
    """Return where weights stand: for every file of the folder what to read from it, our name and the file's.

    ``expected``: shapes by our names; ``renamed``: what the files call a weight; ``ignored``: endings of the files' names that
    are no weights. Raises ValueError for what is missing, unexpected, of another shape, quantised, or in a file that cannot be
    read.
    """
    found: dict[str, tuple[Path, tuple[int, ...], str]] = {}
    for file, names in _files(folder).items():
        with opened(file) as weights:
            held = set(weights.keys())
            lost = sorted((names or held) - held)
            if lost:
                raise ValueError(f"{file} lacks {', '.join(lost[:8])}, which {INDEX} promises: copy or download it again")
            for name in sorted(names or held):
                stored = weights.get_slice(name)
                found[name] = file, tuple(stored.get_shape()), str(stored.get_dtype())
    found = {name: place for name, place in found.items() if not name.endswith(tuple(ignored))}
    ours = {renamed(name): name for name in expected}
    check_state(
        {theirs: expected[name] for theirs, name in ours.items()},
        {name: shape for name, (_, shape, _) in found.items()},
        f"what {folder} holds",
        f"Are {CONFIG} and the weights of the same model?",
        most=8,
    )
    strange = [f"{name} is {found[name][2]}" for name in ours if found[name][2] not in DTYPES]
    if strange:
        raise ValueError(
            f"{folder} holds {', '.join(strange[:8])}: weights must be {', '.join(DTYPES)}, for what is quantised means nothing "
            "without its scales; save the model as it was before it was quantised"
        )
    grouped: dict[Path, dict[str, str]] = {}
    for theirs, name in ours.items():
        grouped.setdefault(found[theirs][0], {})[name] = theirs
    return grouped


@contextmanager
def opened(file: Path, framework: str = "np", device: str = "cpu") -> Iterator[Any]:
    """Open a safetensors file for arrays of that framework; ValueError where it is missing, truncated or of another kind."""
    from safetensors import SafetensorError, safe_open

    try:
        weights = safe_open(file, framework=framework, device=device)  # type: ignore[arg-type]
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing: copy or download it again") from error
    except (SafetensorError, OSError) as error:
        size = f"of {file.stat().st_size} bytes " if file.is_file() else ""
        raise ValueError(
            f"{file} {size}is truncated or no safetensors file ({error}): copy, download or save it again"
        ) from error
    with weights as inside:
        yield inside


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; ValueError that names the file where it is missing or holds no object."""
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object, got a {type(found).__name__}")
    return found


def read_config(folder: Path) -> TransformerConfig:
    """Return the config in a folder that save_weights wrote; ValueError for another one, or for a key that is none of ours."""
    found = read_json(folder / CONFIG)
    if "model_type" in found:
        raise ValueError(f"{folder / CONFIG} is one of Hugging Face's, of a {found['model_type']} model: read it with load_llama")
    try:
        return TransformerConfig.from_json(json.dumps(found))
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error


def to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk and survives a loss of power."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The files of weights, and which weights each should hold; None: all that it does hold."""
    if (folder / WEIGHTS).exists():
        return {folder / WEIGHTS: None}
    if not (folder / INDEX).exists():
        pickles = "; pickles such as pytorch_model.bin are never read: save them as safetensors" * any(folder.glob("*.bin"))
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}{pickles}")
    of = read_json(folder / INDEX).get("weight_map")
    if not isinstance(of, dict) or not all(isinstance(file, str) and Path(file).name == file for file in of.values()):
        raise ValueError(f"{folder / INDEX} must hold a weight_map from names of weights to names of files beside it")
    return {folder / file: {name for name, where in of.items() if where == file} for file in sorted(set(of.values()))}


def _check_replaceable(folder: Path) -> None:
    """ValueError for what a save would destroy: a file, or a folder in which other things are kept."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: weights are saved as a folder")
    ours = lambda path: path.name in (CONFIG, INDEX, WEIGHTS) or path.match("model-?????-of-?????.safetensors")
    kept = [path.name for path in folder.glob("*") if not ours(path)]
    if kept:
        raise ValueError(
            f"{folder} holds {', '.join(sorted(kept)[:8])}, which saving would delete, for it replaces the whole folder: save to "
            "a folder that does not exist yet, or holds weights only"
        )


def _settle(folder: Path, old: Path) -> None:
    """Finish what an interrupted save began: bring back the folder that it set aside, or delete it once it is replaced."""
    if not old.exists():
        return
    if folder.exists():
        rmtree(old, ignore_errors=True)
    else:
        old.rename(folder)
