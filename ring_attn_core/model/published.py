"""What a published model says of itself besides what it computes, kept so that it can be published again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..mistakes import in_words


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a config of Hugging Face says for the programs that use a model, under their names; None: it does not say.

    ``max_position_embeddings``: the longest sequence, in tokens, that they should allow. ``bos_token_id``, ``eos_token_id``,
    ``pad_token_id``: special ids, of ``eos_token_id`` one or several. Raises ValueError for what is no int.
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
