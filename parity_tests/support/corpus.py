"""Folders of documents and their expected batches: plain Python, one token at a time."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ring_attn_core.data.batches import BatchArrays, Batches
from ring_attn_core.data.dataset import FolderDataset
from ring_attn_core.data.index import shuffle
from ring_attn_core.data.settings import DatasetSettings

LENGTHS = (7, 61, 1, 24, 100, 3, 3, 49)
"""Tokens of the documents: shorter than, longer than and equal to a context, and one token."""
LENGTH = 24
"""Tokens of a context, divisible over rings of 1, 2, 3 and 4 in every layout."""
RANKS = (1, 2, 3, 4)

PARAMETERS = inspect.signature(FolderDataset).parameters
DEFAULTS: dict[str, Any] = {name: PARAMETERS[name].default for name in PARAMETERS if name != "folder"} | {"length": LENGTH}
"""The defaults of ``SequenceShardedDataset``."""


def settings(folder: object = "data", **changed: Any) -> DatasetSettings:
    return DatasetSettings(folder=folder, **{**DEFAULTS, **changed})  # type: ignore


def batches(folder: Path, **changed: Any) -> Batches:
    return Batches(settings(folder, **changed))


def write_texts(folder: Path, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Write texts of these numbers of random bytes into the folder and its subfolders. Return their bytes."""
    rng = np.random.default_rng(0)
    documents = []
    for number, tokens in enumerate(lengths):
        path = folder / f"{number // 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        documents.append(rng.integers(97, 123, tokens).tolist())
        path.write_bytes(bytes(documents[-1]))
    return documents


def write_arrays(folder: Path, lengths: Sequence[int] = LENGTHS, dtype: str = "<u2") -> list[list[int]]:
    """Write token arrays in which all ids differ. Return their ids."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = np.cumsum(lengths)
    documents = [np.arange(end - tokens, end) for end, tokens in zip(ends, lengths, strict=True)]
    for number, ids in enumerate(documents):
        np.save(folder / f"{number:04}.npy", ids.astype(dtype))
    return [ids.tolist() for ids in documents]


def whole_batches(documents: list[list[int]], epoch: int = 0, **changed: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return ids and documents [batch, length] of every batch of an epoch, all replicas together; -1 is padding."""
    of = settings(**changed)
    numbers = shuffle(len(documents), "documents", of.seed, epoch) if of.shuffle else range(len(documents))
    stream = [(token, rank) for rank, number in enumerate(numbers) for token in documents[number]]
    contexts = [stream[start : start + of.length] for start in range(0, len(stream), of.length)]
    whole = len(stream) // of.length
    order = shuffle(whole, "contexts", of.seed, epoch) if of.shuffle else list(range(whole))
    contexts = [contexts[number] for number in [*order, *range(whole, len(contexts))]]
    while of.last == "pad" and len(contexts) % of.rows:
        contexts.append([])
    if of.last == "drop":
        del contexts[whole // of.rows * of.rows :]
    rows = np.array([context + [(0, -1)] * (of.length - len(context)) for context in contexts])
    return [(batch[..., 0], batch[..., 1]) for batch in np.split(rows, len(rows) // of.rows)]


def assert_same(ours: Any, theirs: Any) -> None:
    """Assert that two sets of arrays are equal, value by value."""
    for name, x, y in zip(BatchArrays._fields, ours, theirs, strict=False):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)
