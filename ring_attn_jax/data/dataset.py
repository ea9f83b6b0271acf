"""A dataset that reads one rank's shards from a folder of texts or token arrays."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from ring_attn_core.data.batches import Batches
from ring_attn_core.data.settings import DatasetSettings
from ring_attn_core.layouts import ShardLength
from ring_attn_core.plan.balanced_layout import BalancedLayout

from .batch import Shard


class SequenceShardedDataset:
    """An iterable of :class:`Shard`: one rank's part of each batch of packed documents from a folder of files.

    Each file, or each row of a file, is a document. Documents are concatenated and cut into packed rows of ``length`` tokens.
    The tokens of a document within one row form a *span* and attend only within the span (``extents``). A shard equals
    ``shard_batch(ids, layout, ranks, rank, documents=...)`` of the global batch: labels are shifted before sharding, and the last
    token of a span has no label. But a rank reads only the parts of spans that it holds, and after each part at most one token
    more, the label of the part's last token. In the layout ``"striped"`` a rank owns every ``ranks``-th token, so it reads the
    tokens of all ranks twice: once for ids and once for labels.

    ``folder``: a folder of text files in UTF-8; or of files with one document per row, that is ``.jsonl``, ``.parquet``, or
    ``.arrow`` as saved by the package datasets; or of ``.npy`` arrays of token ids, integers [tokens]. ``length``: the number of
    tokens of a packed row, a multiple of ``ranks``; in zigzag, of ``2 * ranks``. ``rank``: the rank whose shards are read; None:
    all ranks, with their shards concatenated. ``batch_size``: packed rows that each replica reads of a batch. ``replicas``: the
    number of data-parallel groups, which read different rows. ``replica``: the index of this group. ``shuffle``: shuffle
    documents and rows by (seed, epoch). ``epochs``: the number of epochs; None: unlimited. ``last``: "drop" the tokens that do
    not fill a batch, or "pad" the batch with tokens that have no label and the extent [0, 0). ``pattern``: the files to read, as
    a glob of pathlib; hidden files are never read. ``column``: the column of the texts in files of rows; rows with an empty or
    null text are skipped. ``tokenizer``: a tokenizer.json of the package tokenizers, or its folder; without one, the ids of a
    text are its bytes, 0 to 255. ``end``: an id to append to each text, at least 256 without a tokenizer. ``cache``: the folder
    in which the first process saves the token ids of the texts, by default ``.ring-attn`` in ``folder``. ``restart_positions``:
    count positions from 0 in each document. ``ignore_index``: the label of a token without a target. ``chat``: "all" or
    "assistant" if the column holds chats, that is, lists of messages. The tokenizer's chat template turns a chat into text, with
    the tools of the column "tools" if that exists. With "assistant" only the assistant's tokens have labels.

    :meth:`grain` makes a grain dataset of the same shards, with grain's workers and checkpoints. An iteration begins at the state
    passed to ``resume``, or else at the first batch.

    With ``layout="balanced"`` the documents of each batch are distributed over the ranks for nearly equal work. The field
    ``layout`` of each shard then holds the balanced layout.

    A run may be resumed with other ranks, layout or workers: the content of a batch does not depend on them.

    Raise ValueError if arguments do not fit, if the data are neither text nor ids, if a file is empty, has vanished or has
    changed, if the data hold no token, or if they fill no batch with ``last="drop"``.
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
        column: str = "text",
        tokenizer: str | os.PathLike[str] | None = None,
        end: int | None = None,
        cache: str | os.PathLike[str] | None = None,
        restart_positions: bool = False,
        ignore_index: int = -100,
        chat: str | None = None,
    ) -> None:
        settings = DatasetSettings(
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
            column=column,
            tokenizer=tokenizer,
            end=end,
            cache=cache,
            restart_positions=restart_positions,
            ignore_index=ignore_index,
            chat=chat,
        )
        self._batches = Batches(settings)

    def __iter__(self) -> Iterator[Shard]:
        """Yield shards: ids, labels and positions int32 [batch, tokens], extents int32 [batch, tokens, 2]."""
        for arrays in self._batches.iterate():
            ids, labels, positions, extents = map(jnp.asarray, arrays[:4])
            yield Shard(ids, labels, positions, extents, None, _length(self._batches, arrays.layout), None, arrays.layout)

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

    @property
    def batches(self) -> int:
        """Return the number of batches per epoch."""
        return self._batches.index.batches

    @property
    def vocab(self) -> int | None:
        """Return the vocabulary size, which is the largest possible id + 1, or None for token arrays."""
        return self._batches.vocab

    @property
    def bytes_read(self) -> int:
        """Return the number of bytes of the tokens that this dataset has read as ids or labels.

        In the layout ``"striped"`` the tokens of other ranks, which this rank reads and skips, do not count.
        """
        return self._batches.reader.bytes_read

    def state(self, batches: int | None = None) -> str:
        """Return the state of the run after ``batches`` batches as JSON.

        ``batches`` counts from the start of the run, over epochs and resumptions. None: the batches up to the last one that the
        newest iteration has yielded. Raise ValueError if ``batches`` exceeds the number of batches of the run.
        """
        return self._batches.state(batches)

    def resume(self, state: str | Mapping[str, object]) -> None:
        """Start every later iteration at ``state``, a return value of :meth:`state`, as text or parsed by json.loads.

        Raise ValueError if ``state`` is not a state, or belongs to a run with other data, length, rows per batch, seed,
        ``shuffle`` or ``last``.
        """
        self._batches.resume(state)


def _length(batches: Batches, dealt: BalancedLayout | None) -> ShardLength:
    return ShardLength(batches.settings.length, dealt or batches.settings.layout, batches.settings.ranks)


class ShardSource:
    """A random access data source for grain. Item i is this rank's shard of batch ``start + i``, counted over all epochs."""

    def __init__(self, batches: Batches, start: int) -> None:
        self._batches, self._start = batches, start

    def __len__(self) -> int:
        """Return the number of shards, or sys.maxsize if epochs are unlimited."""
        end = self._batches.index.end
        return sys.maxsize if end is None else end - self._start

    def __getitem__(self, number: int) -> Shard:
        """Return this rank's shard of batch ``start + number`` as NumPy arrays."""
        *arrays, dealt = self._batches.arrays(self._start + int(number))
        return Shard(*arrays, None, _length(self._batches, dealt), None, dealt)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        """Return a text that identifies the data. grain writes it into its checkpoints."""
        return f"SequenceShardedDataset({self._batches.state(self._start)})"
