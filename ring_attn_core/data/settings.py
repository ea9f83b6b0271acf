"""The arguments of a ``SequenceShardedDataset``, and the checks that do not need its data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from ..layouts import check_rank, check_ranks, find_layout, slots
from ..plan.balanced import balanced_layout
from ..plan.balanced_layout import BalancedLayout
from ..runs import Run
from ..validation import in_words, is_integer
from .chat import CHOICES

BALANCED = "balanced"

BYTES = 256
"""Number of ids without a tokenizer, one for each byte value. An ``end`` id is then at least this number."""

COLUMN = "text"

MAX_INT32 = 2**31 - 1
"""The largest id: ids are int32 in JAX."""


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """The arguments of ``SequenceShardedDataset``, which documents them."""

    folder: str | os.PathLike[str]
    length: int
    layout: str = "zigzag"
    ranks: int = 1
    rank: int | None = 0
    seed: int = 0
    _: KW_ONLY
    batch_size: int = 1
    replicas: int = 1
    replica: int = 0
    shuffle: bool = True
    epochs: int | None = 1
    last: str = "drop"
    pattern: str = "**/*"
    column: str = COLUMN
    tokenizer: str | os.PathLike[str] | None = None
    end: int | None = None
    cache: str | os.PathLike[str] | None = None
    restart_positions: bool = False
    ignore_index: int = -100
    chat: str | None = None
    batch_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, what in (("folder", "the folder of the data"), ("tokenizer", "a tokenizer.json"), ("cache", "a folder")):
            value = getattr(self, name)
            if not isinstance(value, str | os.PathLike) and (value is not None or name == "folder"):
                raise ValueError(f"{name} must be the path of {what}, a str or a Path, got {in_words(value)}")
        runs = 1 if self.layout == BALANCED else slots(self.layout)
        check_ranks(self.ranks)
        if self.rank is not None:
            check_rank(self.rank, self.ranks)
        for name, least in (("length", 1), ("batch_size", 1), ("replicas", 1), ("replica", 0), ("epochs", 1), ("end", 0)):
            value = getattr(self, name)
            if value is None and name in ("epochs", "end"):
                continue
            if not is_integer(value) or value < least:  # type: ignore[operator]
                raise ValueError(f"{name} must be an int of at least {least}, got {in_words(value)}")
        for name in ("seed", "ignore_index"):
            if not is_integer(getattr(self, name)) or abs(getattr(self, name)) > MAX_INT32:
                raise ValueError(f"{name} must be an int of at most {MAX_INT32}, got {in_words(getattr(self, name))}")
        for name in ("shuffle", "restart_positions"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {in_words(getattr(self, name))}")
        if self.last not in ("drop", "pad"):
            raise ValueError(f"last must be 'drop' or 'pad', what becomes of the last tokens, got {in_words(self.last)}")
        if not isinstance(self.pattern, str) or not self.pattern or self.pattern.startswith(("/", "\\")):
            raise ValueError(f"pattern must name files inside of the folder, such as '**/*.txt', got {in_words(self.pattern)}")
        if not isinstance(self.column, str):
            raise ValueError(f"column must be the name of the column that holds the texts, got {in_words(self.column)}")
        if self.chat is not None:
            self._check_chat()
        if self.replica >= self.replicas:
            raise ValueError(f"replica={self.replica} is not one of {self.replicas} replicas: pass 0 to {self.replicas - 1}")
        if self.end is not None and not (0 if self.tokenizer is not None else BYTES) <= self.end <= MAX_INT32:
            least = "0" if self.tokenizer is not None else f"{BYTES}, for the ids below are the bytes of the text"
            raise ValueError(f"end must be an id of at least {least}, and at most {MAX_INT32}, got {self.end}")
        if self.batch_tokens is not None:
            self._check_batch_tokens()
        unit = self.ranks * runs
        if self.length % unit:
            below = self.length // unit * unit
            nearest = f"{below} or {below + unit}" if below else f"{unit}"
            raise ValueError(
                f"length={self.length} cannot be cut into {self.ranks} ranks in the layout {self.layout!r}, {runs} equal run"
                f"{'s' * (runs > 1)} a rank: pass a multiple of {unit}, such as {nearest}"
            )

    def _check_chat(self) -> None:
        if self.chat not in CHOICES:
            raise ValueError(f"chat must be one of {', '.join(CHOICES)}, the tokens with labels, got {in_words(self.chat)}")
        if self.tokenizer is None:
            raise ValueError("chat= needs tokenizer=, a folder with a tokenizer.json and its chat template: pass it")
        if self.end is not None:
            raise ValueError(f"a chat template writes the end of a chat itself, got end={self.end}: leave it out")

    def _check_batch_tokens(self) -> None:
        if self.layout != BALANCED:
            raise ValueError(f'batch_tokens= needs layout="balanced", which deals documents, got {in_words(self.layout)}')
        if self.rows != 1:
            raise ValueError(
                f"with batch_tokens= a microbatch is one row that all ranks share, got batch_size={self.batch_size} and "
                f"replicas={self.replicas}: pass 1 of each, and let ranks be the number of all ranks"
            )
        tokens: Any = self.batch_tokens
        if not is_integer(tokens) or tokens < self.length or tokens % self.length:
            raise ValueError(
                f"batch_tokens must be a multiple of length={self.length}, the tokens of a microbatch, got "
                f"{in_words(self.batch_tokens)}"
            )
        if self.ignore_index >= 0:
            raise ValueError(
                f"with batch_tokens= labels are counted by documents, and ignore_index={self.ignore_index} could be a token: "
                "pass a negative one, such as -100"
            )

    @property
    def marks_labels(self) -> bool:
        return self.chat == "assistant"

    @property
    def rows(self) -> int:
        return self.batch_size * self.replicas

    def deal(self, documents: Iterable[Sequence[int]]) -> BalancedLayout | None:
        """Return the balanced layout of a batch, or None.
        ``documents``: for each packed row, the tokens of each document in it."""
        if self.layout != BALANCED:
            return None
        rows = [lengths for lengths in documents if lengths]
        return replace(balanced_layout(rows, self.ranks, seq_local=self.length // self.ranks), length=self.length)

    def runs(self, dealt: BalancedLayout | None = None) -> tuple[Run, ...]:
        """Return the runs (arithmetic progressions) of a packed row that ``rank`` holds, or those of all ranks if it is None."""
        if dealt is not None:
            held = dealt.runs if self.rank is None else [dealt.runs[int(self.rank)]]
            return tuple(Run(*run) for runs in held for run in runs)
        wanted = range(self.ranks) if self.rank is None else [int(self.rank)]
        return tuple(run for rank in wanted for run in find_layout(self.layout)(rank, self.ranks, self.length // self.ranks))
