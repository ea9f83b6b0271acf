"""The strategy "gather": one all-gather fetches all keys, and one step computes on them.

The backward gathers the keys again. Each rank receives the float32 gradients of its own keys from all ranks, and adds them in
rank order. In memory each rank holds the keys of all ranks; in the backward it also holds the gradients of all keys from its own
queries.
"""

from __future__ import annotations

from functools import reduce

from torch import Tensor

from ...attend.keys import Keys, joined
from ...attend.score import Score
from ...attend.state import BackwardInputs, Gradients
from ..step import Ring
from ..transfer import all_gather, exchange
from .ring import OneWay


class Gather(OneWay):
    """The strategy "gather": each rank all-gathers the keys of all ranks and computes one step."""

    def spread(self, queries: tuple[Tensor, ...], keys: Keys, score: Score, ring: Ring) -> tuple[tuple[Tensor, ...], Keys, Score]:
        """See ``Strategy.spread``."""
        return queries, joined(Keys(*all_gather(keys, ring.group).wait()), keys.kv.shape[1]), score

    def collect_gradients(
        self, dq: Tensor, dkv: Gradients, of_q: BackwardInputs, ring: Ring
    ) -> tuple[Tensor, Gradients, Tensor | None]:
        """See ``Strategy.collect_gradients``."""
        assert isinstance(dkv, Tensor), "what travels is packed"
        (parts,) = exchange((by_rank(dkv, ring.plan.ranks),), 0, ring.group).wait()
        return dq, summed(parts), of_q.sinks


def by_rank(x: Tensor, ranks: int) -> Tensor:
    """Split x [b ranks*n ...] by rank and return it as [ranks b n ...]."""
    return x.unflatten(1, (ranks, x.shape[1] // ranks)).movedim(1, 0)


def summed(parts: Tensor) -> Tensor:
    """Sum ``parts`` [n ...] over n in index order, because the order of additions determines the last bits."""
    return reduce(Tensor.add_, parts[1:], parts[0])
