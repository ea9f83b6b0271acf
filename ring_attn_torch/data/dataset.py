"""Text or token arrays in a folder as one rank's shards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ring_attn_core.data.batches import Arrays, Batches
from ring_attn_core.data.settings import Settings

from .batch import Shard


class SequenceShardedDataset(IterableDataset[Shard]):
    """A folder of files as batches of packed documents: an iterable of :class:`Shard`, each the part of one rank.

    A file is a document. Documents stand one after the other and are cut every ``length`` tokens; each piece attends only to
    itself (``extents``). Shards are what ``shard_batch(ids, layout, ranks, rank, documents=...)`` makes of whole batches: labels
    are shifted before the sharding, and the last token of a piece has none. But a rank reads only its own tokens, and one more at
    the end of each of its runs; of ``"striped"`` shards, whose next tokens all lie on other ranks, twice its own.

    ``folder``: text files in UTF-8, whose ids are their bytes, 0 to 255; or ``.npy`` arrays of token ids, integers [tokens].
    ``length``: tokens of a context, a multiple of what the ranks need. ``rank``: None for all shards side by side.
    ``batch_size``: contexts of a batch. ``replicas``, ``replica``: how many data-parallel groups take other contexts, and which
    this is. ``shuffle``: documents and contexts in an order of (seed, epoch). ``epochs``: None for no end. ``last``: "drop" the
    tokens that fill no batch, or "pad" them (no labels, extents [0, 0)). ``pattern``: which files, as pathlib's glob takes it;
    hidden ones never. ``tokenizer``: a tokenizer.json of the package tokenizers. ``end``: an id to put after every text, 256 or
    more without a tokenizer. ``cache``: where the tokens of texts are kept, ``.ring-attn`` in the folder unless given; who comes
    first makes them, once. ``restart_positions``, ``ignore_index``: as in ``shard_batch``.

    Give it to ``DataLoader(dataset, batch_size=None, num_workers=...)``: any number of workers makes the same batches in the same
    order. An iteration begins where ``resume`` says, and at the beginning without it.

    What a batch holds follows from data, seed and number, not from ranks, layout or workers. So a run may be resumed with others.

    Raises ValueError for arguments that do not fit, data that are no text or no ids, files that are empty, vanished or changed,
    and less data than a batch.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        length: int,
        layout: str = "zigzag",
        ranks: int = 1,
        rank: int | None = 0,
        seed: int = 0,
        *,
        batch_size: int = 1,
        replicas: int = 1,
        replica: int = 0,
        shuffle: bool = True,
        epochs: int | None = 1,
        last: str = "drop",
        pattern: str = "**/*",
        tokenizer: str | os.PathLike[str] | None = None,
        end: int | None = None,
        cache: str | os.PathLike[str] | None = None,
        restart_positions: bool = False,
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        settings = Settings(
            folder=folder,
            length=length,
            layout=layout,
            ranks=ranks,
            rank=rank,
            seed=seed,
            batch_size=batch_size,
            replicas=replicas,
            replica=replica,
            shuffle=shuffle,
            epochs=epochs,
            last=last,
            pattern=pattern,
            tokenizer=tokenizer,
            end=end,
            cache=cache,
            restart_positions=restart_positions,
            ignore_index=ignore_index,
        )
        self._batches = Batches(settings)
        self._elsewhere = torch.zeros(1, dtype=torch.bool, device="cpu").share_memory_()  # whether a worker has begun to read

    def __iter__(self) -> Iterator[Shard]:
        """ids and labels int64 [batch, tokens], positions int32 [batch, tokens], extents int32 [batch, tokens, 2]."""
        worker = get_worker_info()
        if worker is not None:
            self._elsewhere.fill_(True)
        for arrays in self._batches.iterate(worker.id if worker else 0, worker.num_workers if worker else 1):
            yield self._shard(arrays)

    def _shard(self, arrays: Arrays) -> Shard:
        ids, labels, positions, extents = map(torch.from_numpy, arrays)
        return Shard(ids.long(), labels.long(), positions, extents, None, self._batches.settings.length)

    @property
    def batches(self) -> int:
        """How many batches an epoch has."""
        return self._batches.index.batches

    @property
    def vocab(self) -> int | None:
        """One more than the largest id; None for token arrays."""
        return self._batches.vocab

    @property
    def bytes_read(self) -> int:
        """How many bytes of tokens this process has read."""
        return self._batches.reader.bytes_read

    def state(self, batches: int | None = None) -> str:
        """Where the run stands, as JSON: after the batches that the latest iteration gave, or after ``batches`` of them.

        ``batches`` counts from the very beginning, over epochs and resumptions. Workers read ahead, so behind a DataLoader with
        workers only the loop knows how many it took: ValueError without ``batches`` then, and for more than there are.
        """
        if batches is None and self._elsewhere.item():
            raise ValueError(
                "workers of a DataLoader have read this dataset, and they read ahead: say how many batches the loop took since "
                "the very beginning, dataset.state(batches=...)"
            )
        return self._batches.state(batches)

    def resume(self, state: str | Mapping[str, object]) -> None:
        """Begin every later iteration where ``state`` stands, what :meth:`state` returned, as text or read by json.loads.

        ValueError for what is none, and for a state of other data, length, contexts a batch, seed, ``shuffle`` or ``last``.
        """
        self._batches.resume(state)
