"""Text or token arrays in a folder as one rank's shards."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from ring_attn_core.data.batches import Batches
from ring_attn_core.data.settings import Settings

from .batch import Shard


class SequenceShardedDataset:
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

    :meth:`grain` makes a dataset of grain of it, with its workers and its checkpoints. An iteration begins where ``resume`` says,
    and at the beginning without it.

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

    def __iter__(self) -> Iterator[Shard]:
        """ids, labels and positions int32 [batch, tokens], extents int32 [batch, tokens, 2]."""
        for arrays in self._batches.iterate():
            ids, labels, positions, extents = map(jnp.asarray, arrays)
            yield Shard(ids, labels, positions, extents, None, self._batches.settings.length)

    def grain(self) -> Any:
        """A ``grain.MapDataset`` of the same shards as numpy arrays, from where ``resume`` says to the end of the last epoch.

        Whatever grain does with it, such as ``.to_iter_dataset()``, keeps a state of its own. Raises ModuleNotFoundError without
        the package grain.
        """
        try:
            from grain import MapDataset  # type: ignore[import-not-found]  # optional
        except ModuleNotFoundError as missing:
            if missing.name != "grain":
                raise
            raise ModuleNotFoundError(
                "SequenceShardedDataset.grain() needs grain: run pip install grain", name="grain"
            ) from missing
        return MapDataset.source(Source(self._batches, self._batches.start))

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

        ``batches`` counts from the very beginning, over epochs and resumptions. ValueError for more than there are.
        """
        return self._batches.state(batches)

    def resume(self, state: str | Mapping[str, object]) -> None:
        """Begin every later iteration where ``state`` stands, what :meth:`state` returned, as text or read by json.loads.

        ValueError for what is none, and for a state of other data, length, contexts a batch, seed, ``shuffle`` or ``last``.
        """
        self._batches.resume(state)


class Source:
    """What grain calls a random access data source: the shards from ``start`` on, by their numbers."""

    def __init__(self, batches: Batches, start: int) -> None:
        self._batches, self._start = batches, start

    def __len__(self) -> int:
        """How many shards there are; without an end as many as an int says."""
        end = self._batches.index.end
        return sys.maxsize if end is None else end - self._start

    def __getitem__(self, number: int) -> Shard:
        """The shard of that number, in numpy."""
        return Shard(*self._batches.arrays(self._start + int(number)), None, self._batches.settings.length)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        """What grain writes into its checkpoints, to know the data again."""
        return f"SequenceShardedDataset({self._batches.state(self._start)})"
