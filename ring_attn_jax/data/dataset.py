"""A dataset that reads one rank's shards from a folder of texts or token arrays."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ring_attn_core.data.batches import BatchArrays, Batches
from ring_attn_core.data.dataset import FolderDataset
from ring_attn_core.data.settings import DatasetSettings
from ring_attn_core.layouts import ShardLength

from .batch import Shard


class SequenceShardedDataset(FolderDataset):
    """An iterable of :class:`Shard`: one rank's part of each batch of packed documents from a folder of files.

    The method :meth:`grain` makes a grain dataset of the same shards, with grain's workers and checkpoints. An iteration begins
    at the state passed to ``resume``, or else at the first batch. The constructor documents files, arguments and errors.
    """

    def __iter__(self) -> Iterator[Shard]:
        """Yield shards: ids, labels and positions int32 [batch, tokens], extents int32 [batch, tokens, 2]."""
        for arrays in self._batches.iterate():
            yield jax.tree.map(jnp.asarray, _shard(self._batches.settings, arrays))

    def grain(self) -> Any:
        """Return a ``grain.MapDataset`` of the same shards as NumPy arrays, from the resumed state to the end of the last epoch.

        Datasets and iterators that grain derives from it, such as ``.to_iter_dataset()``, keep a state of their own, and
        :meth:`state` does not count their batches. Raise ModuleNotFoundError if the package grain is missing.
        """
        try:
            from grain import MapDataset  # type: ignore[import-not-found]  # optional
        except ModuleNotFoundError as missing:
            if missing.name != "grain":
                raise
            raise ModuleNotFoundError(
                "SequenceShardedDataset.grain() needs grain: run pip install grain", name="grain"
            ) from missing
        return MapDataset.source(ShardSource(self._batches, self._batches.start))


def _shard(settings: DatasetSettings, batch: BatchArrays) -> Shard:
    *arrays, dealt, labels = batch
    length = ShardLength(settings.length, dealt or settings.layout, settings.ranks)
    total = None if labels is None else np.int32(labels)
    return Shard(*arrays, key_mask=None, length=length, layout=dealt, batch_labels=total)  # type: ignore[arg-type]


class ShardSource:
    """A random access data source for grain. Item i is this rank's shard of batch ``start + i``, counted over all epochs."""

    def __init__(self, batches: Batches, start: int) -> None:
        self._batches, self._start = batches, start

    def __len__(self) -> int:
        end = self._batches.index.end
        return sys.maxsize if end is None else end - self._start

    def __getitem__(self, number: int) -> Shard:
        """Return this rank's shard of batch ``start + number`` as NumPy arrays."""
        return _shard(self._batches.settings, self._batches.arrays(self._start + int(number)))

    def __repr__(self) -> str:
        """Return a text that identifies the data. grain writes it into its checkpoints."""
        return f"SequenceShardedDataset({self._batches.state(self._start)})"
