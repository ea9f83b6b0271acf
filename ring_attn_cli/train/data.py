"""The data and the weights of a run: their checks, made before the ranks train, and the model, by the package of a framework."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arithmetic import first_adapters, first_weights
from .config import DTYPES, Config, Data

if TYPE_CHECKING:
    from ring_attn_core.model.config import TransformerConfig


def dataset_arguments(config: Config, held_out: bool) -> dict[str, Any]:
    """Return the arguments of ``SequenceShardedDataset``. The cache is in the run's folder: the data's may be read-only."""
    same = {name: getattr(config.data, name) for name in ("folder", "length", "seed", "column", "tokenizer", "end", "chat")}
    pattern = config.data.held_out if held_out else config.data.pattern
    whole = {"batch_tokens": None if held_out else config.data.batch_tokens}
    ring = {"layout": config.ring.layout, "ranks": config.ring.ranks}
    return {**same, **ring, "pattern": pattern, "cache": Path(config.out, ".cache"), "epochs": None, **whole}


def check(config: Config) -> str:
    """Check the data, passkeys, ``init_from`` and ``lora``, writing the token cache if needed.
    Return a text about the documents that are both training data and held out; "" without any."""
    from ring_attn_core.data.passkey import passkey

    for length in config.passkey.lengths:
        passkey(length, digits=config.passkey.digits)
    if config.passkey.train_every:
        passkey(config.data.length, digits=config.passkey.digits)
    if config.data.tokenizer is not None and (config.passkey.lengths or config.passkey.train_every):
        raise ValueError("passkeys are bytes, and data.tokenizer makes other ids: set passkey.lengths = [] and train_every = 0")
    training, held_out = (_check_documents(config, held_out) for held_out in (False, True))
    _check_init_from(config)
    both = sorted(training & held_out)
    return "" if not both else both[0] if len(both) == 1 else f"{both[0]} and {len(both) - 1} more"


def _check_documents(config: Config, held_out: bool) -> set[str]:
    """Check the training data, or the held-out data, and return the names of its documents."""
    from ring_attn_core.data.batches import documents_of
    from ring_attn_core.data.global_batches import index_of
    from ring_attn_core.data.settings import DatasetSettings

    size, replicas = config.data.batch_size, config.ring.replicas
    rows: dict[str, Any] = {"rank": None, "batch_size": size, "replica": 0, "replicas": replicas, "shuffle": True}
    rows |= {"last": "drop", "restart_positions": False, "ignore_index": -100}
    settings = DatasetSettings(**dataset_arguments(config, held_out), **rows)
    try:
        documents = documents_of(settings)
        index_of([each.tokens for each in documents.documents], settings)
    except ValueError as error:
        if held_out and config.data.held_out == Data.held_out and not any(Path(config.data.folder).glob(Data.held_out)):
            raise ValueError(
                f"data.held_out is missing: beside pattern = {config.data.pattern!r} give held_out, the pattern of the files "
                f"in {config.data.folder} that evaluate the model"
            ) from error
        raise ValueError(f"data.held_out: {error}" if held_out else f"data: {error}") from error
    if config.init_from is None:
        check_vocab(documents.vocab, config.transformer().vocab)
    return {each.name for each in documents.documents}


def check_vocab(data: int | None, model: int) -> None:
    if data is not None and data > model:
        raise ValueError(f"the data have ids from 0 to {data - 1}, and the model {model}: make model.vocab at least {data}")


def _check_init_from(config: Config) -> None:
    if config.init_from is None:
        return
    if not Path(config.init_from, "config.json").is_file():
        inside = Path(config.init_from, "weights")
        meant = f"did you mean {str(inside)!r}? " if (inside / "config.json").is_file() else ""
        raise ValueError(
            f"init_from = {config.init_from!r} is not a folder with a config.json: {meant}pass one that save_weights or Hugging "
            "Face has written"
        )
    if config.lora is not None:
        config.lora.check(_read_model_config(config.init_from))


def _read_model_config(folder: str) -> TransformerConfig:
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


def build_model(config: Config, package: Any, make: Callable[..., Any], **options: Any) -> Any:
    """Load the model from ``init_from`` if set, else draw weights by ``first_weights``. Add adapters if ``lora`` is set.
    ``make``: makes a model of a TransformerConfig with any weights. ``options``: the ring's, for it and for a load."""
    options |= config.ring.model_options
    if config.init_from is not None:
        load = package.load_llama if is_llama(config.init_from) else package.load_weights
        param_dtype, compute_dtype = (config.model.get(name) for name in DTYPES)
        model = load(config.init_from, dtype=param_dtype, compute_dtype=compute_dtype, **options)
    else:
        model = make(config.transformer(), **options)
        package.from_numpy(model, first_weights(package.to_numpy(model), config.seed))
    if config.lora is not None:
        adapters = first_adapters(config.lora, model.config, config.seed)
        package.training.lora.add_adapters(model, config.lora, adapters)
    return model


def save_model(config: Config, package: Any, model: Any, **group: Any) -> None:
    """Save the weights in the run's folder; with LoRA, first save the adapters and merge them into the weights."""
    if config.lora is not None:
        package.training.lora.save_adapters(model, config.lora, Path(config.out, "adapters"), config.init_from, **group)
        package.training.lora.merge_adapters(model)
    package.save_weights(model, Path(config.out, "weights"), **group)
