"""The measured calls: their masks, documents and operations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from ring_attn_core import Band, Gather, RingPlan, causal, full, sliding_window
from ring_attn_core.plan.balanced import BalancedLayout, balanced_layout
from ring_attn_core.plan.two_level import TwoLevel
from ring_attn_core.problem.strategies import STRATEGIES, Strategy, objection

MASKS = ("causal", "full", "window", "documents")
LAYOUTS = ("zigzag", "balanced", "contiguous", "striped")
TRAVELLING: dict[str, Strategy] = {
    **{name: name for name in STRATEGIES if name not in ("auto", "two_level")},
    "two_level": TwoLevel(ranks=2),
    **{str(record): record for record in (Gather(groups=2), Gather(groups=4))},
}
"""The strategies by name, measured where they can run the call. "two_level" treats two GPUs as a host."""
STILL = "ring without transfers"
ALONE = "one launch of equal work"
PASSES = ("forward", "backward")


class Call(NamedTuple):
    """One measured call. ``tokens``: per rank. ``mask``: one of ``MASKS``. ``window``: number of keys seen before a query."""

    tokens: int
    heads: int
    kv_heads: int
    mask: str
    window: int = 4096
    dim: int = 128
    layout: str = "zigzag"

    @property
    def band(self) -> Band:
        """Return the mask as a Band of positions."""
        return {"full": full(), "window": sliding_window(self.window)}.get(self.mask, causal())

    def layout_of(self, ranks: int) -> str | BalancedLayout:
        """Return the layout as ``ring_attention`` takes it."""
        return balanced_layout(self.documents(ranks), ranks, mask=self.band) if self.layout == "balanced" else self.layout

    def plan(self, ranks: int) -> RingPlan:
        """Return the plan of the ring."""
        return RingPlan(self.layout_of(ranks), self.band, ranks, self.tokens)

    def documents(self, ranks: int) -> list[int]:
        """Return the lengths of the documents, which fill the sequence: log-normal, the same at every call."""
        length = self.tokens * ranks
        if self.mask != "documents":
            return [length]
        drawn, lengths = random.Random(0), []
        while sum(lengths) < length:
            lengths.append(min(max(round(drawn.lognormvariate(7.2, 1.3)), 64), length // 4, length - sum(lengths)))
        return lengths

    def extents(self, ranks: int) -> list[tuple[int, int]] | None:
        """Return the first and end of the keys that each token of the sequence may see; None without documents."""
        if self.mask != "documents":
            return None
        found: list[tuple[int, int]] = []
        for tokens in self.documents(ranks):
            found += [(len(found), len(found) + tokens)] * tokens
        return found

    def flops(self, ranks: int) -> dict[str, float]:
        """Return a rank's FLOPs by pass: two matrix products over the visible pairs forward, five backward."""
        pairs = self.heads * sum(self.band.area(tokens, tokens) for tokens in self.documents(ranks)) / ranks
        return {"forward": 4 * pairs * self.dim, "backward": 10 * pairs * self.dim}

    def alone(self, ranks: int) -> int:
        """Return the length, a multiple of 128, of a sequence with as many visible pairs as a rank computes in the ring."""
        if self.mask == "window":
            return self.tokens
        return max(128, round(self.tokens * ranks**0.5 / 128) * 128)

    def __str__(self) -> str:
        mask = f"window of {self.window:,}" if self.mask == "window" else self.mask
        return f"{self.tokens:,} tokens, {self.heads}/{self.kv_heads} heads of {self.dim}, {mask}, {self.layout}"


class Problem(NamedTuple):
    """The calls that one run measures, as lists of their fields, and the rounds of the turns."""

    calls: list[list[int | str]]
    rounds: int
    peers: bool
    dtype: str = "bfloat16"
    strategy: Sequence[str] = (*TRAVELLING,)

    def strategies(self, call: Call, ranks: int, memory: bool) -> dict[str, Strategy]:
        """Return the chosen strategies that can run the call, by name. ``memory``: GPUs whose memory PyTorch shares."""
        fits = lambda name: objection(TRAVELLING[name], ranks, call.heads, call.kv_heads) is None and (memory or name != "push")
        return {name: TRAVELLING[name] for name in self.strategy if fits(name)}


def rates(seconds: dict[str, float], flops: dict[str, dict[str, float]]) -> list[dict[str, object]]:
    """Return a row for each candidate: milliseconds and TFLOP/s of a GPU by pass. ``seconds``: by candidate and pass."""
    rows: list[dict[str, object]] = []
    for name in dict.fromkeys(key.rpartition(" ")[0] for key in seconds):
        row: dict[str, object] = {"candidate": name}
        for each in PASSES:
            taken = seconds[f"{name} {each}"]
            row |= {f"{each} ms": round(taken * 1e3, 3), f"{each} TFLOP/s": round(flops[name][each] / taken / 1e12, 1)}
        rows.append(row)
    return rows
