"""Folders of weights in safetensors files: open all files of one save, and locate each weight in them.

File names are Hugging Face's: ``config.json`` and ``model.safetensors``, or several files ``model-00001-of-00002.safetensors``
with ``model.safetensors.index.json``, which maps each weight to its file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..files import Identity, check_regular, identity, open_file, read_json, sample
from ..validation import in_words
from .config import TransformerConfig
from .weight_names import check_state

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

SAVING, REPLACED = ".{}.saving", ".{}.replaced"
"""Names of two folders that a save of the folder ``{}`` makes beside it: the incomplete new one, and the old one moved aside."""

DTYPES = "F32", "BF16", "F16", "F64"
"""safetensors' names of the dtypes that weights may be stored in."""

SAMPLES = 256

TRIES, LOOKS = 5, 10
"""The most attempts to open a folder that another process keeps replacing, and to find, 10 ms apart, one that a save renames."""


class WeightFile(NamedTuple):
    """An open safetensors file."""

    weights: Any
    promised: set[str] | None
    """The names of weights that the index lists for the file; None without an index."""
    file: BinaryIO
    """The file itself, kept open: ``check_unwritten`` compares its ``fstat`` with ``identity``."""
    identity: Identity


class WeightFolder(NamedTuple):
    """A folder of weights with all files open, so that all come from the same save even if the folder is replaced."""

    folder: Path
    config: dict[str, Any]
    files: dict[Path, WeightFile]

    def check_unwritten(self) -> None:
        for path, each in self.files.items():
            _check_unwritten(path, each.identity, each.file.fileno())

    def digest(self, config: TransformerConfig) -> str:
        """Return 16 hex digits: a digest of ``config`` and of blocks of bytes, sampled from each weight file."""
        what = [config.to_json(), *(sample(each.file, SAMPLES) for each in self.files.values())]
        return sha256(json.dumps(what).encode()).hexdigest()[:16]


class Naming(NamedTuple):
    """The naming conventions of a folder that ``save_weights`` or Hugging Face wrote."""

    config: Callable[[WeightFolder], TransformerConfig]
    renamed: Callable[[str], str]
    """Maps a weight's name in RingTransformer to its name in the files."""
    ignored: Callable[[TransformerConfig], tuple[str, ...]]
    """Returns patterns, such as ``*.inv_freq``, for a config. A weight in the files is ignored if its name fits one."""


@contextmanager
def open_folder(folder: str | Path, framework: str = "np", device: str = "cpu") -> Iterator[WeightFolder]:
    """Open all files of one save, at most TRIES times if a save replaces the folder. Later saves do no harm."""
    for _ in range(TRIES):
        place = current(folder)
        with ExitStack() as stack:
            try:
                number = os.open(place, os.O_RDONLY)  # while it is open, no other folder gets its inode
                stack.callback(os.close, number)
                held = _open_files(place, stack, framework, device)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ValueError(f"{place} cannot be read: {error}") from error
            except ValueError:
                deleted = place != resolve(folder) and resolve(folder).is_dir()  # the end of a save deletes the old folder
                if _is_at(place, number) and not deleted:  # type: ignore[possibly-undefined]
                    raise
                continue
            if not _is_at(place, number):
                continue
            yield held
            return
    raise ValueError(f"{folder} was replaced {TRIES} times while it was read: load it when no process writes there")


def current(folder: str | Path) -> Path:
    """Return ``folder``, or the folder moved aside if a save was killed. A save may hide both for a moment: look LOOKS times."""
    folder = resolve(folder)
    old = folder.with_name(REPLACED.format(folder.name))
    for _ in range(LOOKS):
        for place in (folder, old):
            if place.is_dir():
                return place
        time.sleep(0.01)
    raise ValueError(f"{folder} is not a folder: pass one with {CONFIG} and {WEIGHTS} in it")


def resolve(folder: str | Path) -> Path:
    """Return the path of a folder of weights, with symbolic links resolved."""
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ValueError(f"folder must be the path of a folder of weights, a str or a Path, got {in_words(folder)}")
    try:
        found = Path(folder).resolve()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{folder} cannot be followed, its symbolic links go round in a circle: {error}") from error
    except ValueError as error:  # a zero byte in the path
        raise ValueError(f"folder must be the path of a folder of weights, got {os.fspath(folder)!r}: {error}") from error
    if not found.name:
        raise ValueError(f"{folder} is the root of the file system: pass a folder in it")
    return found


def sources(
    held: WeightFolder, expected: Mapping[str, tuple[int, ...]], renamed: Callable[[str], str], ignored: Iterable[str] = ()
) -> dict[Path, dict[str, str]]:
    """Return, for each file with weights of the model, a dict from weight names in the model to weight names in the file.
    ``expected``: shapes by name in the model. ``renamed``: maps these names to the files'. ``ignored``: patterns of names in the
    files."""
    listed = set[str]().union(*(each.promised or () for each in held.files.values()))
    found: dict[str, tuple[Path, tuple[int, ...], str]] = {}
    for file, each in held.files.items():
        names, stands = each.promised, set(each.weights.keys())
        lost = sorted((names or stands) - stands)
        if lost:
            raise ValueError(f"{file} lacks {', '.join(lost[:8])}, which {INDEX} promises: copy or download it again")
        for name in sorted((names or set()) | (stands - listed)):
            stored = each.weights.get_slice(name)
            found[name] = file, tuple(stored.get_shape()), str(stored.get_dtype())
    found = {name: place for name, place in found.items() if not any(fnmatchcase(name, each) for each in ignored)}
    ours = {renamed(name): name for name in expected}
    check_state(
        {theirs: expected[name] for theirs, name in ours.items()},
        {name: shape for name, (_, shape, _) in found.items()},
        f"what {held.folder} holds",
        f"Are {CONFIG} and the weights of the same model?",
        most=8,
    )
    strange = [f"{name} is {found[name][2]}" for name in ours if found[name][2] not in DTYPES]
    if strange:
        raise ValueError(
            f"{held.folder} holds {', '.join(strange[:8])}: weights must be {', '.join(DTYPES)}, for what is quantised means "
            "nothing without its scales; save the model as it was before it was quantised"
        )
    grouped: dict[Path, dict[str, str]] = {}
    for theirs, name in ours.items():
        grouped.setdefault(found[theirs][0], {})[name] = theirs
    return grouped


def differ(held: WeightFolder, one: str, other: str) -> bool:
    """Return whether the files hold both weights, with different values. Compare a part of SAMPLES rows at a time."""
    held_in = lambda name: [each.weights.get_slice(name) for each in held.files.values() if name in set(each.weights.keys())]
    found = held_in(one)[:1] + held_in(other)[:1]
    if len(found) < 2:
        return False
    if found[0].get_shape() != found[1].get_shape() or not {str(x.get_dtype()) for x in found} <= {*DTYPES}:
        return True
    rows = found[0].get_shape()[0]
    parts = (slice(first, min(first + SAMPLES, rows)) for first in range(0, rows, SAMPLES))
    return any(bool((found[0][part] != found[1][part]).any()) for part in parts)


@contextmanager
def open_weights(file: Path, framework: str = "np", device: str = "cpu") -> Iterator[Any]:
    """Open a safetensors file for arrays of ``framework``. Raise ValueError if it is missing, damaged or not regular."""
    from safetensors import SafetensorError, safe_open

    check_regular(file)
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


def own_config(held: WeightFolder) -> TransformerConfig:
    file = held.folder / CONFIG
    if "model_type" in held.config:
        raise ValueError(f"{file} is one of Hugging Face's, of a {held.config['model_type']} model: read it with load_llama")
    try:
        return TransformerConfig.from_json(json.dumps(held.config))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


OWN = Naming(own_config, lambda name: name, lambda config: ())


def to_disk(path: Path) -> None:
    """Call fsync on a file, so that it survives a loss of power. On a folder, fsync preserves the names of its files."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _open_files(place: Path, stack: ExitStack, framework: str, device: str) -> WeightFolder:
    texts = {place / name: identity(place / name) for name in (CONFIG, INDEX) if (place / name).exists()}
    config = read_json(place / CONFIG)
    files = {}
    for path, promised in _files(place).items():
        try:
            file = stack.enter_context(open_file(path))
        except OSError as error:
            why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise ValueError(f"{path} {why}: copy or download it again") from error
        was = identity(file.fileno())
        files[path] = WeightFile(stack.enter_context(open_weights(path, framework, device)), promised, file, was)
        _check_unwritten(path, was, path)
    for path, was in texts.items():
        _check_unwritten(path, was, path)
    return WeightFolder(place, config, files)


def _is_at(place: Path, number: int) -> bool:
    """Return whether ``place`` is still the folder open as file descriptor ``number``; a save may have moved it."""
    try:
        return os.path.samestat(os.stat(place), os.fstat(number))
    except FileNotFoundError:
        return False


def _check_unwritten(path: Path, was: Identity, where: Path | int) -> None:
    """Raise ValueError if a file was written to since it was opened as ``was``, or replaced, by a path ``where``."""
    try:
        now = identity(where)
    except OSError as error:
        raise ValueError(f"{path} vanished while it was read ({error.strerror}): load it when no process writes there") from error
    if now[:4] != was[:4]:
        raise ValueError(f"{path} was written to while it was read: load it when no process writes there")


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """Return the weight files, each with the set of weight names that the index lists for it; None without an index."""
    if os.path.lexists(folder / WEIGHTS):
        return {folder / WEIGHTS: None}
    if not os.path.lexists(folder / INDEX):
        pickles = "; pickles such as pytorch_model.bin are never read: save them as safetensors" * any(folder.glob("*.bin"))
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}{pickles}")
    files = read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) and Path(file).name == file for file in files.values()):
        raise ValueError(f"{folder / INDEX} must hold a weight_map from names of weights to names of files beside it")
    return {folder / file: {name for name, where in files.items() if where == file} for file in sorted(set(files.values()))}
