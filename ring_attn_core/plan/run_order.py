"""The runs of all ranks in order of position: what a recurrence and a convolution need to know of other ranks.

A recurrence carries a state from each run to the next one in order of position; a convolution of ``w`` taps reads the ``w - 1``
tokens before each run, its *halo*. With 16 tokens over 2 ranks in zigzag, and a halo of 2 tokens:

    rank 0    run 0: 0 1 2 3          run 1: 12 13 14 15, halo 10 11 (rank 1, run 1)
    rank 1    run 0: 4 5 6 7, halo 2 3 (rank 0, run 0)    run 1: 8 9 10 11, halo 6 7 (its own run 0)
    order     (0, 0), (1, 0), (1, 1), (0, 1)              as (rank, run)

Tables are tuples with an entry for each rank, so both frameworks pick that of a rank. Positions of documents are not known
here; they arrive as extents, and become masks. An empty run, of padding only, comes last, reads nothing and sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from .balanced_layout import BalancedLayout
from .ring import RingPlan, Runs


class Halo(NamedTuple):
    """The exchange of the ``width`` tokens before each run. A rank has ``places = runs * width``; -1 stands for no token.

    ``tails`` [ranks][places]: the index in its shard of each token that a rank sends, the last ``width`` of each run. ``sources``
    [ranks][places]: where each token of its halos lies among the places of all ranks. ``readers`` [ranks][turns][places]: the
    halos that read each sent token, in order.
    """

    tails: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[int, ...], ...]
    readers: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class RunOrder:
    """The order of the runs of one layout. ``runs``: for each rank its runs (base, length, start), without padding.

    ``base``: the first token's index in the shard; ``start``: its position. ``documents``: for each batch row the lengths of the
    documents that a balanced layout was made for, or empty: then any run may continue the document of the run before it.
    """

    runs: tuple[tuple[tuple[int, int, int], ...], ...]
    documents: tuple[tuple[int, ...], ...] = ()

    @property
    def ranks(self) -> int:
        return len(self.runs)

    @cached_property
    def order(self) -> tuple[tuple[int, int], ...]:
        """Return (rank, run) of each run that holds tokens, in order of position."""
        held = ((start, rank, i) for rank, runs in enumerate(self.runs) for i, (_, n, start) in enumerate(runs) if n)
        return tuple((rank, i) for _, rank, i in sorted(held))

    @cached_property
    def senders(self) -> tuple[tuple[int, ...], ...]:
        """Return for each rank its runs whose document another run continues, if documents are known; else all but the last."""
        edges = [{*accumulate(row)} for row in self.documents]
        ends = {at: sum(self.runs[at[0]][at[1]][1:]) for at in self.order[:-1]}
        kept = {at for at, end in ends.items() if not edges or any(end not in row and end < max(row, default=0) for row in edges)}
        return tuple(tuple(i for i in range(len(runs)) if (rank, i) in kept) for rank, runs in enumerate(self.runs))

    @property
    def slots(self) -> int:
        """Return the number of states that each rank sends: the most senders of any rank."""
        return max(map(len, self.senders), default=0)

    @property
    def sent(self) -> tuple[tuple[int, ...], ...]:
        """Return [ranks][slots]: the run of each state that a rank sends, -1 for none."""
        return tuple((*senders, *[-1] * (self.slots - len(senders))) for senders in self.senders)

    def halo(self, width: int) -> Halo:
        """Return the exchange of the ``width`` tokens before each run."""
        places = [(rank, i, w) for rank, runs in enumerate(self.runs) for i in range(len(runs)) for w in range(width)]
        tails, sent = [], {}  # sent: the place of a position among all tails
        for place, (rank, i, w) in enumerate(places):
            base, n, start = self.runs[rank][i]
            is_sent = n + w >= width
            tails.append(base + n - width + w if is_sent else -1)
            if is_sent:
                sent[start + n - width + w] = place
        sources, readers = [], [[] for _ in places]
        for place, (rank, i, w) in enumerate(places):
            _, n, start = self.runs[rank][i]
            sources.append(sent.get(start - width + w, -1) if n else -1)
            if sources[-1] >= 0:
                readers[sources[-1]].append(place)
        most = max(map(len, readers), default=0)
        columns = [[(*each, *[-1] * (most - len(each)))[turn] for each in readers] for turn in range(most)]
        each_rank = len(places) // self.ranks
        cut = lambda values: tuple(tuple(values[rank * each_rank :][:each_rank]) for rank in range(self.ranks))
        by_rank = zip(*map(cut, columns), strict=True) if columns else [()] * self.ranks
        return Halo(cut(tails), cut(sources), tuple(by_rank))


def run_order(plan: RingPlan, documents: bool = True) -> RunOrder:
    """Return the order of a plan's query runs; ``documents``: a balanced layout's documents end the states of its runs."""
    layout = plan.order
    return _run_order(plan.q_runs, layout.documents if documents and isinstance(layout, BalancedLayout) else ())


@lru_cache(maxsize=64)
def _run_order(runs: tuple[Runs, ...], documents: tuple[tuple[int, ...], ...]) -> RunOrder:
    return RunOrder(tuple(tuple(run[:3] for run in rank_runs) for rank_runs in runs), documents)


def splits_heads(ranks: int, heads: int) -> bool:
    """Return whether it is less to fold a part of the heads on each rank than to send all maps to all ranks."""
    return 2 * -(-heads // ranks) < heads
