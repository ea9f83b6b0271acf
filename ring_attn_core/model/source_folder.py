"""The files beside the weights of a saved Hugging Face model: config.json, and the original tokenizer and generation config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..files import read_bytes, read_json
from .config import TransformerConfig
from .llama import FIXED, TYPES, their_config
from .weight_files import CONFIG

TOKENIZERS = "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"
"""Files of tokenizers. A folder without any of them counts as a folder without a tokenizer."""

BESIDE = (
    *TOKENIZERS,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
"""Files that are copied from the folder of the Hugging Face model, if they exist."""

WRITTEN = {*FIXED, *TYPES, "dtype", "head_dim", "num_key_value_heads", "rope_theta", "torch_dtype"}
"""Keys never copied from the source's config.json: the saved model sets them or leaves them out."""

DROPPED = {"auto_map", "_name_or_path"}
"""Keys of the source's config.json that name code or a folder elsewhere; they are not copied."""


def files_of(config: TransformerConfig, length: int | None, source: str | Path | None) -> dict[str, bytes]:
    """Return the content of each file that ``save_llama`` writes beside the weights, by file name.
    With a ``source`` of the same model_type, its other config keys but WRITTEN and DROPPED are kept. ``length``: in tokens."""
    ours = their_config(config, length)
    if source is None:
        return {CONFIG: json.dumps(ours, indent=2).encode()}
    folder = Path(source)
    try:
        theirs = read_json(folder / CONFIG)
        found = {name: read_bytes(folder / name) for name in BESIDE if (folder / name).exists()}
    except (OSError, ValueError) as error:
        raise ValueError(f"source={str(source)!r} cannot be read ({error}): pass the folder that load_llama read") from error
    if not set(TOKENIZERS) & found.keys():
        raise ValueError(f"source={str(source)!r} has no tokenizer ({', '.join(TOKENIZERS)}): leave it out, or put one there")
    ids = theirs.get("vocab_size", 0)
    if isinstance(ids, int) and ids > config.vocab:
        raise ValueError(
            f"source={str(source)!r} has {ids} token ids, and the model {config.vocab}: pass the folder it came from"
        )
    same = theirs.get("model_type") == ours["model_type"]
    kept: dict[str, Any] = {name: x for name, x in theirs.items() if same and name not in (ours.keys() | WRITTEN | DROPPED)}
    return {CONFIG: json.dumps(ours | kept, indent=2).encode(), **found}
