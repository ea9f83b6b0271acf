"""Metadata of a published model, kept so that the model can be published again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..validation import in_words


@dataclass(frozen=True, kw_only=True)
class Published:
    """Fields of a Hugging Face config for programs that use the model, under Hugging Face's names. None: the field is not set.

    ``max_position_embeddings``: the longest sequence, in tokens, that such programs should allow. ``bos_token_id``,
    ``eos_token_id``, ``pad_token_id``: ids of special tokens; ``eos_token_id`` may be several ids in a list or tuple. Raise
    ValueError if any of these values is neither an int nor None, or ``max_position_embeddings`` is below 1.
    """

    max_position_embeddings: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.eos_token_id, list):
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        for name in ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            several = value if name == "eos_token_id" and isinstance(value, tuple) else (value,)
            if not all(x is None or (isinstance(x, int) and not isinstance(x, bool)) for x in several):
                raise ValueError(f"{name} must be an int{' or several' * (name == 'eos_token_id')}, got {in_words(value)}")
        if self.max_position_embeddings is not None and self.max_position_embeddings < 1:
            raise ValueError(f"max_position_embeddings must be at least 1, got {self.max_position_embeddings}")
