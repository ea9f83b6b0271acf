"""The options of a call, except arrays, ring and ``return_lse``, as a record with defaults, checks and a text form."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..layouts import plain_length
from ..masks import causal, check_mask, with_numbers
from ..plan.balanced_layout import BalancedLayout
from ..plan.ring import check_steps
from ..records import hash_once
from ..runs import Band
from ..validation import hold_numbers, in_words, number_in_words
from .checks import check_dropout_rate, check_scale, check_softcap
from .strategies import Strategy, check_order, check_strategy, read_strategy

NO_COUNT = 2**62
"""The count that stands for None. Token counts and the sides of masks stay below it, so that their sums fit int64."""


@hash_once
@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one call of ``ring_attention`` or ``attend_block``: its arguments except arrays, ring and position runs.

    ``steps`` is not public: dilated attention skips shifts at which no query sees a key. ``v_dim``: None if v is an array;
    otherwise the values are the first ``v_dim`` columns of k, and only k travels. ``dropout_offset``: global indices of the
    first batch row and of the first head; -1 for an array on a device, whose value the host does not read.
    """

    layout: str | BalancedLayout = "zigzag"
    mask: Band = field(default_factory=causal)
    length: int | None = None
    kv_length: int | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_rate: float = 0.0
    dropout_offset: tuple[int, int] = (0, 0)
    strategy: Strategy = "auto"
    order: str = "ring"
    backend: str = "auto"
    deterministic: bool = False
    steps: tuple[int, ...] | None = None
    v_dim: int | None = None

    def __post_init__(self) -> None:
        check_strategy(self.strategy)
        check_order(self.order, self.strategy)
        check_mask(self.mask)
        hold_numbers(self, ("length", "kv_length", "scale", "softcap", "dropout_rate"))
        object.__setattr__(self, "mask", with_numbers(self.mask))
        for name, text in (("layout", self.layout), ("backend", self.backend)):
            if not isinstance(text, str) and not (name == "layout" and isinstance(text, BalancedLayout)):
                or_made = ", or a BalancedLayout" if name == "layout" else ""
                raise ValueError(f"{name} must be its name, a str{or_made}, got {in_words(text)}")
        sides = ("mask.lo", self.mask.lo), ("mask.hi", self.mask.hi)
        for name, count in (*sides, ("length", self.length), ("kv_length", self.kv_length)):
            if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
                raise ValueError(
                    f"{name} must be int or None, a count of tokens (static under jit), got {number_in_words(count)}"
                )
            if count is not None and abs(count) >= NO_COUNT:
                raise ValueError(
                    f"{name} counts tokens, got {count}: to see everything on a side, leave it open as causal() does"
                )
        check_scale(self.scale)
        check_softcap(self.softcap)
        check_dropout_rate(self.dropout_rate)
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic must be True or False, got {in_words(self.deterministic)}")
        if self.steps is not None:
            check_steps(self.steps)

    def in_ring(self, ranks: int) -> Options:
        """Return the options with ints as lengths. Raise ValueError if a length is of a shard made for another layout or ring."""
        lengths = {name: plain_length(getattr(self, name), self.layout, ranks) for name in ("length", "kv_length")}
        return replace(self, **lengths)

    @property
    def values_in_keys(self) -> bool:
        return self.v_dim is not None

    @property
    def counts(self) -> list[int]:
        """Return the options that a PyTorch op takes as integers, since they change between calls; NO_COUNT is None."""
        counts = self.length, self.kv_length, self.mask.lo, self.mask.hi
        return [*(NO_COUNT if count is None else count for count in counts), *self.dropout_offset]

    @property
    def text(self) -> str:
        """Return all options except ``counts`` as text for a PyTorch op's schema; torch.compile must trace each line."""
        numbers = [None if x is None else float(x) for x in (self.scale, self.softcap, self.dropout_rate)]
        listed = ", ".join([f"{x}" for x in numbers])
        steps = None if self.steps is None else list(self.steps)
        layout: object = self.layout
        if isinstance(self.layout, BalancedLayout):
            layout = self.layout.runs, self.layout.length, self.layout.documents, self.layout.tree
        names = f"{str(self.strategy)!r}, {self.order!r}, {self.backend!r}, {self.deterministic}"
        return f"({layout!r}, {listed}, {names}, {steps}, {self.v_dim})"

    @classmethod
    def read(cls, text: str, counts: Sequence[int]) -> Options:
        layout, *others = ast.literal_eval(text)
        names = "scale", "softcap", "dropout_rate", "strategy", "order", "backend", "deterministic", "steps", "v_dim"
        values: dict[str, Any] = dict(zip(names, others, strict=True))
        values["strategy"] = read_strategy(values["strategy"])
        values["steps"] = None if values["steps"] is None else tuple(values["steps"])
        length, kv_length, lo, hi = (None if count == NO_COUNT else count for count in counts[:4])
        values |= {"mask": Band(lo, hi), "length": length, "kv_length": kv_length, "dropout_offset": (counts[4], counts[5])}
        return cls(layout=layout if isinstance(layout, str) else BalancedLayout(*layout), **values)
