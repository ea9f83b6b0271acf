"""The patterns of a layer of dilated attention, as one record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from .dilated import check_mixing, check_patterns


@dataclass(frozen=True, kw_only=True)
class Patterns:
    """``segments``, ``dilations`` and ``mixing`` as ``dilated_attention`` takes them, for a layer of so many ``heads``.

    Raises ValueError for patterns that do not fit, as the call would.
    """

    segments: Sequence[int]
    dilations: Sequence[int]
    mixing: str
    heads: int

    def __post_init__(self) -> None:
        patterns = check_patterns(self.segments, self.dilations)
        check_mixing(self.mixing, len(patterns), self.heads)
        for name, values in zip(("segments", "dilations"), zip(*patterns, strict=True), strict=True):
            object.__setattr__(self, name, values)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return what ``dilated_attention`` is told of them, by name."""
        return {x.name: getattr(self, x.name) for x in fields(self) if x.name != "heads"}
