"""A dataset that reads one rank's shards from a folder of texts or token arrays."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ring_attn_core.data.dataset import FolderDataset
from ring_attn_core.data.settings import DatasetSettings

from .batch import Shard


class SequenceShardedDataset(FolderDataset, IterableDataset[Shard]):
    """An iterable of :class:`Shard`: one rank's part of each batch of packed documents from a folder of files.

    Pass the dataset to ``DataLoader(dataset, batch_size=None, num_workers=...)``: any number of workers yields the same batches
    in the same order. An iteration begins at the state passed to ``resume``, or else at the first batch. The constructor
    documents the files, the arguments and the errors.
    """

    def _read(self, settings: DatasetSettings) -> None:
        super()._read(settings)
        self._elsewhere = torch.zeros(1, dtype=torch.bool, device="cpu").share_memory_()  # True once a worker reads

    def __iter__(self) -> Iterator[Shard]:
        """Yield shards: ids and labels int64, positions int32 [batch, tokens], extents int32 [batch, tokens, 2]."""
        worker = get_worker_info()
        if worker is not None:
            self._elsewhere.fill_(True)
        for arrays in self._batches.iterate(worker.id if worker else 0, worker.num_workers if worker else 1):
            ids, labels, positions, extents = map(torch.from_numpy, arrays[:4])
            length = self._batches.settings.length
            total = None if arrays.batch_labels is None else torch.tensor(arrays.batch_labels)
            made = ids.long(), labels.long(), positions, extents, None, length
            yield Shard(*made, layout=arrays.layout, batch_labels=total)

    def state(self, batches: int | None = None) -> str:
        """Return the state of the run after ``batches`` batches as JSON.

        ``batches`` counts from the start of the run, over epochs and resumptions. None: the batches up to the last one that the
        newest iteration has yielded. Workers of a DataLoader read ahead, so only the training loop knows how many batches it has
        used. Raise ValueError if ``batches`` is None although workers have read, or if ``batches`` exceeds the number of batches
        of the run.
        """
        if batches is None and self._elsewhere.item():
            raise ValueError(
                "workers of a DataLoader have read this dataset, and they read ahead: say how many batches the loop took since "
                "the very beginning, dataset.state(batches=...)"
            )
        return self._batches.state(batches)
