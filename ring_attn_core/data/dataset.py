"""The part of both packages' ``SequenceShardedDataset`` that needs no framework: arguments, state and counts."""

from __future__ import annotations

from collections.abc import Mapping

from ..constructor import takes
from .batches import Batches
from .settings import DatasetSettings


class FolderDataset:
    """One rank's part of each batch of packed documents from a folder of files."""

    @takes(DatasetSettings)
    def __init__(self, settings: DatasetSettings) -> None:
        """Find the documents of a folder, and tokenise them if the cache lacks their tokens.

        Each file, or each row of a file, is a document. Documents are concatenated and cut into packed rows of ``length`` tokens.
        The tokens of a document within one row form a *span* and attend only within the span (``extents``). A shard equals
        ``shard_batch(ids, layout, ranks, rank, documents=...)`` of the global batch: labels are shifted before sharding, and the
        last token of a span has no label. But a rank reads only the parts of spans that it holds, and after each part at most one
        token more, the label of the part's last token. In the layout ``"striped"`` a rank owns every ``ranks``-th token, so it
        reads the tokens of all ranks twice: once for ids and once for labels.

        ``folder``: a folder of text files in UTF-8; or of files with one document per row, that is ``.jsonl``, ``.parquet``, or
        ``.arrow`` as saved by the package datasets; or of ``.npy`` arrays of token ids, integers [tokens]. ``length``: the number
        of tokens of a packed row, a multiple of ``ranks``; in zigzag, of ``2 * ranks``. ``rank``: the rank whose shards are read;
        None: all ranks, with their shards concatenated. ``batch_size``: packed rows that each replica reads of a batch.
        ``replicas``: the number of data-parallel groups, which read different rows. ``replica``: the index of this group.
        ``shuffle``: shuffle documents and rows by (seed, epoch). ``epochs``: the number of epochs; None: unlimited. ``last``:
        "drop" the tokens that do not fill a batch, or "pad" the batch with tokens that have no label and the extent [0, 0).
        ``pattern``: the files to read, as a glob of pathlib; hidden files are never read. ``column``: the column of the texts in
        files of rows; rows with an empty or null text are skipped. ``tokenizer``: a tokenizer.json of the package tokenizers, or
        its folder; without one, the ids of a text are its bytes, 0 to 255. ``end``: an id to append to each text, at least 256
        without a tokenizer. ``cache``: the folder in which the first process saves the token ids of the texts, by default
        ``.ring-attn`` in ``folder``. ``restart_positions``: count positions from 0 in each document. ``ignore_index``: the label
        of a token without a target. ``chat``: "all" or "assistant" if the column holds chats, that is, lists of messages. The
        tokenizer's chat template turns a chat into text, with the tools of the column "tools" if that exists. With "assistant"
        only the assistant's tokens have labels.

        With ``layout="balanced"`` the documents of each batch are distributed over the ranks for nearly equal work. The field
        ``layout`` of each shard then holds the balanced layout.

        ``batch_tokens``: the tokens of a global batch, a multiple of ``length``, if the layout is "balanced". Documents then
        stay whole: each global batch is ``batch_tokens / length`` microbatches of ``length`` tokens, planned as by
        :func:`plan_batches`, and the dataset yields these. A document that has no room begins the next global batch. The field
        ``batch_labels`` of each shard is the number of labels of its whole global batch. So the sum over the microbatches of
        ``loss(..., reduction="sum") / shard.batch_labels`` is the mean over all labels of the global batch. With
        ``last="drop"`` the documents after the last full global batch of an epoch are dropped.

        A run may be resumed with other ranks, layout or workers: the content of a batch does not depend on them.

        Raise ValueError if arguments do not fit, if the data are neither text nor ids, if a file is empty, has vanished or has
        changed, if the data hold no token, or if they fill no batch with ``last="drop"``.
        """
        self._read(settings)

    def _read(self, settings: DatasetSettings) -> None:
        self._batches = Batches(settings)

    @property
    def batches(self) -> int:
        """Return the number of batches per epoch; with ``batch_tokens``, of microbatches of the first epoch."""
        return self._batches.index.batches

    @property
    def vocab(self) -> int | None:
        """Return the vocabulary size, which is the largest possible id + 1, or None for token arrays."""
        return self._batches.vocab

    @property
    def bytes_read(self) -> int:
        """Return the number of bytes of the tokens that this process has read as ids or labels.

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
        ``shuffle``, ``last`` or ``batch_tokens``.
        """
        self._batches.resume(state)
