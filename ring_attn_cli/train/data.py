"""The checks of a run's data and initial weights, made before the ranks train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from .config import Config, Data

if TYPE_CHECKING:
    from ring_attn_core.model.config import TransformerConfig


class DatasetArguments(TypedDict):
    """The arguments of ``SequenceShardedDataset`` that are the same in PyTorch and JAX."""

    folder: str
    length: int
    layout: str
    ranks: int
    seed: int
    pattern: str
    column: str
    tokenizer: str | None
    end: int | None
    cache: Path
    chat: str | None


def arguments(config: Config, held_out: bool) -> DatasetArguments:
    """Return the arguments of a dataset. The token cache lies in the run's folder: the data's folder may be read-only."""
    of = config.data
    return {
        "folder": of.folder,
        "length": of.length,
        "layout": config.ring.layout,
        "ranks": config.ring.ranks,
        "seed": of.seed,
        "pattern": of.held_out if held_out else of.pattern,
        "column": of.column,
        "tokenizer": of.tokenizer,
        "end": of.end,
        "cache": Path(config.out, ".cache"),
        "chat": of.chat,
    }


def check(config: Config) -> str:
    """Check the data, passkeys, ``init_from`` and ``lora``, writing the token cache if needed.
    Return a text about the documents that are both training data and held out; "" without any."""
    from ring_attn_core.data.batches import documents_of
    from ring_attn_core.data.index import Index
    from ring_attn_core.data.passkey import passkey
    from ring_attn_core.data.settings import DatasetSettings

    for length in config.passkey.lengths:
        passkey(length, digits=config.passkey.digits)
    if config.passkey.train_every:
        passkey(config.data.length, digits=config.passkey.digits)
    if config.data.tokenizer is not None and (config.passkey.lengths or config.passkey.train_every):
        raise ValueError("passkeys are bytes, and data.tokenizer makes other ids: set passkey.lengths = [] and train_every = 0")
    names: list[set[str]] = []
    for held_out in (False, True):
        settings = DatasetSettings(
            **arguments(config, held_out),
            rank=None,
            batch_size=config.data.batch_size,
            replica=0,
            replicas=config.ring.replicas,
            shuffle=True,
            epochs=None,
            last="drop",
            restart_positions=False,
            ignore_index=-100,
        )
        try:
            documents = documents_of(settings)
            Index([each.tokens for each in documents.documents], settings)
        except ValueError as error:
            if held_out and config.data.held_out == Data.held_out and not any(Path(config.data.folder).glob(Data.held_out)):
                raise ValueError(
                    f"data.held_out is missing: beside pattern = {config.data.pattern!r} give held_out, the pattern of the files "
                    f"in {config.data.folder} that evaluate the model"
                ) from error
            raise ValueError(f"data.held_out: {error}" if held_out else f"data: {error}") from error
        names.append({each.name for each in documents.documents})
        if config.init_from is None:
            check_vocab(documents.vocab, config.transformer().vocab)
    if config.init_from is not None and not Path(config.init_from, "config.json").is_file():
        inside = Path(config.init_from, "weights")
        meant = f"did you mean {str(inside)!r}? " if (inside / "config.json").is_file() else ""
        raise ValueError(
            f"init_from = {config.init_from!r} is no folder with a config.json: {meant}pass one that save_weights or Hugging "
            "Face has written"
        )
    if config.init_from is not None and config.lora is not None:
        config.lora.check(config_in(config.init_from))
    both = sorted(names[0] & names[1])
    return "" if not both else both[0] if len(both) == 1 else f"{both[0]} and {len(both) - 1} more"


def check_vocab(data: int | None, model: int) -> None:
    """Raise ValueError if the data's vocabulary size exceeds the model's. If ``data`` is None, do nothing."""
    if data is not None and data > model:
        raise ValueError(f"the data have ids from 0 to {data - 1}, and the model {model}: make model.vocab at least {data}")


def config_in(folder: str) -> TransformerConfig:
    """Return the model's config in a folder that ``save_weights`` or Hugging Face wrote. Raise ValueError if it is invalid."""
    from ring_attn_core.files import read_json
    from ring_attn_core.model.llama import THEIRS
    from ring_attn_core.model.weight_files import OWN, WeightFolder

    held = WeightFolder(Path(folder), read_json(Path(folder, "config.json")), {})
    return (THEIRS if is_llama(folder) else OWN).config(held)


def is_llama(folder: str) -> bool:
    """Return True if the folder's config.json is in Hugging Face's format, False if it is this library's or cannot be read."""
    from ring_attn_core.files import read_json

    try:
        return "model_type" in read_json(Path(folder, "config.json"))
    except (OSError, ValueError):
        return False  # load_weights raises the error
