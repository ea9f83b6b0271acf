"""Microbatches of a global batch of documents: whole documents, as few microbatches as fit, and equal compute in each.

A microbatch is a packed row of ``ranks * tokens_per_rank`` tokens. Its balanced layout deals the documents to all ranks, so a
short document stays on one rank and a long one lies on as many as it needs. The documents go one by one, that of most compute
first, to the microbatch with the least compute so far that has room (longest processing time first, Graham 1969).

If a document does not fit, best fit in order of decreasing length packs all documents anew, without regard to compute.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush, heapreplace
from typing import Any, NamedTuple

from ..layouts import check_ranks
from ..lazy_numpy import np
from ..masks import causal
from ..runs import Band
from ..validation import as_number, check_integer, in_words, is_integer
from .balanced import balanced_layout, work_of
from .balanced_layout import BalancedLayout
from .documents import PackedDocuments, document_rows

MAX_TOKENS = 2**31 - 1
"""The largest number of tokens of a microbatch: int32 holds their positions."""

MAX_COST = 1e30
"""The largest compute of a token, in visible pairs."""


class ComputeCost(NamedTuple):
    """The compute of a model, in visible (query, key) pairs of one of its layers. ``TransformerConfig.cost()`` makes it."""

    token: float = 0.0
    """The compute of a token besides attention, such as the products with weights, in pairs."""
    masks: tuple[tuple[Band, float], ...] = ((causal(), 1.0),)
    """The masks of attention, each with its share of all layers; recurrent layers have none."""


@dataclass(frozen=True)
class Batch:
    """A microbatch. ``documents``: indices into the lengths of the global batch, ascending, in the order of the packed row.
    ``lengths``: tokens of these documents. ``pairs``: visible pairs of a layer. ``compute``: pairs, and tokens by their cost."""

    documents: tuple[int, ...]
    lengths: tuple[int, ...]
    pairs: float
    compute: float
    _ranks: int = field(repr=False)
    _seq_local: int = field(repr=False)
    _masks: tuple[tuple[Band, float], ...] | None = field(repr=False)

    @cached_property
    def layout(self) -> BalancedLayout:
        """Return the balanced layout of the microbatch, with the same tokens a rank as all others. It is made on first use.
        Raise ValueError if ``plan_batches`` got ``pairs``."""
        if self._masks is None:
            raise ValueError(
                "plan_batches got pairs=, so it does not know who sees whom in these documents: pass layout='balanced' to "
                "shard_batch, with tree= or documents=, and ids padded to ranks * tokens_per_rank"
            )
        made = balanced_layout(self.lengths, self._ranks, seq_local=self._seq_local, mask=dict(self._masks) or None)
        return replace(made, length=self._ranks * self._seq_local)

    @cached_property
    def balance(self) -> float:
        """Return the largest compute of a rank divided by the mean compute; the token slots of all ranks are equal."""
        token = (self.compute - self.pairs) / max(sum(self.lengths), 1)
        layout, pairs = self.layout, [0.0] * self._ranks
        if self._masks:
            packed = PackedDocuments.of(self.lengths, dict(self._masks))
            pairs = [work_of(packed, layout.held(rank)).pairs for rank in range(self._ranks)]
        most, mean = max(pairs), sum(pairs) / len(pairs)
        slots = token * self._seq_local  # padding is computed too
        return (most + slots) / (mean + slots) if mean + slots else 1.0


class BatchPlan(list[Batch]):
    """The microbatches of a global batch, a list of ``Batch``. Its text says what is balanced and what is left."""

    @property
    def balance(self) -> float:
        """Return the largest compute of a microbatch divided by the mean."""
        compute = [batch.compute for batch in self]
        return max(compute) * len(self) / sum(compute) if sum(compute) else 1.0

    def __str__(self) -> str:
        """Return the counts of documents, tokens and padding, the balance of the microbatches, and the reason if it is poor."""
        tokens, slots = [sum(batch.lengths) for batch in self], self[0]._ranks * self[0]._seq_local
        documents, most = sum(len(batch.documents) for batch in self), max(self, key=lambda batch: batch.compute)
        shape = f"{len(self)} microbatches of {slots:,} ({self[0]._ranks} ranks x {self[0]._seq_local:,})"
        padding = 1 - sum(tokens) / (slots * len(self))
        text = (
            f"{documents:,} documents of {sum(tokens):,} tokens in {shape}: {padding:.1%} of the slots are padding; compute of a "
            f"microbatch, most / mean {self.balance:.3f}"
        )
        if self.balance > 1.05:
            text += (
                f"; the most has a document of {max(most.lengths):,} tokens: ranks wait only within a microbatch, so this costs "
                "no time, but larger tokens_per_rank or more documents even it out"
            )
        return text


def plan_batches(
    lengths: Sequence[int],
    ranks: int,
    tokens_per_rank: int,
    seed: int = 0,
    cost: float | ComputeCost | None = None,
    pairs: Sequence[float] | None = None,
) -> BatchPlan:
    """Distribute the documents of a global batch over microbatches of ``ranks * tokens_per_rank`` tokens, with equal compute.

    ``lengths``: the tokens of each document. ``ranks``: the ranks of the ring, which hold every microbatch together; ranks that
    are data-parallel today join it. ``tokens_per_rank``: the tokens that a rank holds of each microbatch, padding included.
    ``seed``: decides the order of the microbatches and the places of equally long documents. ``cost``: the compute of a token
    besides attention, in visible (query, key) pairs; ``config.cost()`` of a TransformerConfig, which knows windows and recurrent
    layers too; or None: pairs alone. ``pairs``: the visible pairs of each document in a layer, if the masks do not tell, such as
    ``rollouts.pairs`` for a prefix tree, or those of a document in which the tokens of an image see each other.

    Return a ``BatchPlan``, a list of ``Batch`` with the fields ``documents`` (indices into ``lengths``) and ``layout``
    (a BalancedLayout, made on first use). Each document lies whole in one microbatch. The number of microbatches is the least
    that holds the tokens, or, if documents do not fit into these whole, at most that of best fit by decreasing length. All have
    the same shapes. ``str(plan)`` says how even they are. The result depends on the arguments alone.

    Raise ValueError if an argument is invalid, or if a document is longer than a microbatch.
    """
    check_ranks(ranks)
    if not is_integer(tokens_per_rank) or tokens_per_rank < 1:
        raise ValueError(f"tokens_per_rank must be an int of at least 1, got {in_words(tokens_per_rank)}")
    check_integer("seed", seed)
    ranks, tokens_per_rank, seed = int(ranks), int(tokens_per_rank), int(seed)
    sizes, capacity = _check_lengths(lengths), ranks * tokens_per_rank
    if capacity > MAX_TOKENS:
        raise ValueError(
            f"a microbatch of {ranks} ranks x {tokens_per_rank} tokens is too long: int32 holds {MAX_TOKENS} positions"
        )
    if (longest := int(sizes.max())) > capacity:
        raise ValueError(
            f"document {int(sizes.argmax())} has {longest} tokens, and a microbatch of {ranks} ranks x {tokens_per_rank} tokens "
            f"holds {capacity}: pass tokens_per_rank={-(-longest // ranks)} or more, or cut the document"
        )
    compute = cost_of(cost)
    visible = pairs_of(sizes, compute.masks) if pairs is None else _check_pairs(pairs, sizes)
    count = -(-int(sizes.sum()) // capacity)
    dealt = deal(sizes, visible, count, capacity, seed, compute.token)
    if dealt is None:
        fitted = best_fit(sizes.tolist(), np.argsort(-sizes, kind="stable").tolist(), capacity)
        most = int(fitted.max()) + 1
        tried = sorted({count + -(-(most - count) * part // 8) for part in range(1, 9)} - {count})  # each takes a whole deal
        wider = (deal(sizes, visible, bins, capacity, seed, compute.token) for bins in tried)
        dealt = next((x for x in wider if x is not None), fitted)
    order, counts, masks = np.argsort(dealt, kind="stable"), np.bincount(dealt), compute.masks if pairs is None else None
    tokens, in_batches = (np.bincount(dealt, x) for x in (sizes, visible))
    work, plan = (in_batches + compute.token * tokens).tolist(), BatchPlan()
    indices, ordered, end = order.tolist(), sizes[order].tolist(), 0
    for number, held in enumerate(counts.tolist()):
        begin, end = end, end + held
        parts = tuple(indices[begin:end]), tuple(ordered[begin:end])
        plan.append(Batch(*parts, float(in_batches[number]), work[number], ranks, tokens_per_rank, masks))
    return plan


def cost_of(cost: Any) -> ComputeCost:
    """Return ``cost``, a number, a ComputeCost or None, as a ComputeCost."""
    masks = cost.masks if isinstance(cost, ComputeCost) else ComputeCost().masks
    number = 0.0 if cost is None else as_number(cost.token if isinstance(cost, ComputeCost) else cost)
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number <= MAX_COST:
        what = f"the compute of a token in visible pairs, a number from 0 to {MAX_COST:g}, or config.cost()"
        raise ValueError(f"cost must be {what}, got {in_words(cost)}")
    return ComputeCost(float(number), masks)


def pairs_of(sizes: np.ndarray, masks: Iterable[tuple[Band, float]]) -> np.ndarray:
    """Return the visible pairs of each document in a layer, averaged over the layers. ``masks``: with their shares of layers."""
    total = np.zeros(len(sizes))
    for band, share in masks:
        if band == causal():
            total += share * (sizes * (sizes + 1.0) / 2)
        else:
            different, where = np.unique(sizes, return_inverse=True)
            total += share * np.array([band.area(n, n) for n in different.tolist()], float)[where]
    return total


def deal(sizes: np.ndarray, pairs: np.ndarray, count: int, capacity: int, seed: int, token: float) -> np.ndarray | None:
    """Return the microbatch, 0 to ``count - 1``, of each document, with about equal compute; None if one does not fit.
    ``pairs``: visible pairs by document. ``token``: compute of a token in pairs."""
    draw = np.random.RandomState(seed % 2**32).random_sample  # NumPy freezes the numbers that a RandomState draws
    compute = pairs + token * sizes
    order = np.lexsort((draw(len(sizes)), -sizes, -compute))
    unit = max(float(compute.max()), 1e-300) * len(sizes) * count / 2**61
    steps = np.rint(compute / unit).astype(np.int64) * count  # in an integer, with the number of the microbatch, heaps are fast
    placed = _place(sizes[order].tolist(), steps[order].tolist(), count, capacity)
    if placed is None:
        return None
    dealt = np.empty(len(sizes), np.int64)
    dealt[order] = placed
    return np.argsort(draw(count))[dealt]


def _place(sizes: list[int], steps: list[int], count: int, capacity: int) -> list[int] | None:
    """Return the microbatch of each document, in their order: that of least compute with room; None if none has room.
    ``steps``: compute in multiples of ``count``, so that a key, compute + number, also holds the number of the microbatch."""
    keys, rooms = [*range(count)], [capacity] * count
    full: list[tuple[int, int]] = []  # minus the room, and the key, of each that had no room for a document
    placed = []
    for tokens, step in zip(sizes, steps, strict=True):
        while full and -full[0][0] >= tokens:
            heappush(keys, heappop(full)[1])
        while keys:
            key = keys[0]
            number = key % count
            if rooms[number] >= tokens:
                break
            heappush(full, (-rooms[number], heappop(keys)))
        else:
            return None
        heapreplace(keys, key + step)
        rooms[number] -= tokens
        placed.append(number)
    return placed


def best_fit(sizes: Sequence[int], order: Iterable[int], capacity: int) -> np.ndarray:
    """Return the microbatch of each document. Each goes, in ``order``, where it leaves the least room, or into a new one."""
    rooms: list[tuple[int, int]] = []
    placed, count = np.empty(len(sizes), np.int64), 0
    for document in order:
        at = bisect_left(rooms, (sizes[document], -1))
        if at < len(rooms):
            room, number = rooms.pop(at)
        else:
            room, number, count = capacity, count, count + 1
        placed[document] = number
        insort(rooms, (room - sizes[document], number))
    return placed


def _check_lengths(lengths: Any) -> np.ndarray:
    found = _as_array(lengths)
    if found is None or found.ndim != 1 or found.dtype.kind not in "iu" or not found.size or found.min() < 1:
        rows = [] if found is not None and not found.ndim else document_rows(lengths)  # says which length is wrong
        if len(rows) != 1 or not rows[0]:
            what = "the tokens of the documents of a global batch, at least one"
            raise ValueError(f"lengths are {what}, such as [4096, 512], got {in_words(lengths)}")
        found = np.array(rows[0])
    return found.astype(np.int64)


def _check_pairs(pairs: Any, sizes: np.ndarray) -> np.ndarray:
    found = _as_array(pairs)
    if found is None or found.shape != sizes.shape or found.dtype.kind not in "iuf":
        got = in_words(pairs) if found is None else f"{found.dtype} {list(found.shape)}"
        raise ValueError(f"pairs must be a list with a number for each of {len(sizes)} documents, got {got}")
    right = (found >= 0) & (found.astype(float) <= sizes.astype(float) ** 2)
    if not right.all():
        at = int(right.argmin())
        what = f"the visible pairs of document {at} of {int(sizes[at])} tokens, at most as many as its square"
        raise ValueError(f"pairs[{at}] must be {what}, got {in_words(found[at].item())}")
    return found.astype(float)


def _as_array(numbers: Any) -> np.ndarray | None:
    try:
        return np.asarray(numbers) if isinstance(numbers, list | tuple | np.ndarray) else None
    except ValueError:  # lists of several lengths
        return None
