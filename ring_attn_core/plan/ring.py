"""The plan of one ring: each rank's positions, each step's visible keys, and how far keys and gradients travel.

The plan is arithmetic on the host, the same for JAX and PyTorch. At shift ``s`` rank ``r`` works on the keys that started on rank
``r - s``. The plan has a step for shift 0, and for every other shift at which some rank sees a key. Keys travel only as far as
the largest of these shifts, which a sliding window may make small. A query that sees no key is *blank* (``blanks``): its out is
0, and its lse is the logit of its head's attention sink, or -inf for padding or without sinks. A key that no query sees is a
*blank key* (``blank_keys``).

A *run* (base, length, start, stride) is a part of a shard: its ``length`` tokens without padding begin at index ``base`` of the
shard, and have the positions ``start``, ``start + stride``, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, ClassVar

from .. import layouts
from ..dropout import SPAN
from ..masks import check_mask, with_numbers
from ..runs import Band, Row, Run, row
from ..validation import hold_numbers, number_in_words
from .balanced_layout import BalancedLayout
from .ulysses import HeadSplit

Runs = tuple[tuple[int, int, int, int], ...]
Rows = tuple[tuple[Row, ...], ...]


def check_steps(steps: Any) -> None:
    counts = isinstance(steps, tuple) and all(isinstance(shift, int) and not isinstance(shift, bool) for shift in steps)
    if not counts or steps[:1] != (0,) or any(b <= a for a, b in pairwise(steps)):
        raise ValueError(f"steps must be None or a tuple of increasing shifts that begins with 0, such as (0, 1), got {steps!r}")


@dataclass(frozen=True)
class RingPlan:
    """The plan of one ring as a frozen and hashable record.

    ``layout``: a name in LAYOUTS, or a BalancedLayout. ``mask``: a Band in global positions. ``ranks``: the size of the ring.
    ``seq_local``, ``kv_local``: tokens in one rank's query and key shard, padding included. ``length``, ``kv_length``: true
    global lengths in tokens; the rest of the shards is padding. Padding keys are masked; padding queries have out 0 and lse -inf.

    ``steps``: the shifts of the steps, 0 first; None: every shift at which the mask lets some rank see a key. A caller that
    leaves out such a shift must hide its keys by a key mask or by extents (the interval of keys that each query may see).

    Defaults: ``kv_local = seq_local``. In a balanced layout ``length`` and ``kv_length`` are the length of the layout. Otherwise
    ``length = seq_local * ranks``, and ``kv_length = length`` if query and key shards are equal in size, else ``kv_local *
    ranks``. Raise ValueError if a field is invalid, or fields do not fit together.
    """

    layout: str | BalancedLayout
    mask: Band
    ranks: int
    seq_local: int
    kv_local: int = None  # type: ignore[assignment]  # set by __post_init__, an int from then on
    length: int = None  # type: ignore[assignment]
    kv_length: int = None  # type: ignore[assignment]
    steps: tuple[int, ...] | None = None
    q_shards: ClassVar[int] = 1
    k_shards: ClassVar[int] = 1
    head_split: ClassVar[HeadSplit | None] = None
    groups: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_mask(self.mask)
        hold_numbers(self, ("ranks", "seq_local", "kv_local", "length", "kv_length"))
        object.__setattr__(self, "mask", with_numbers(self.mask))
        for name, side in (("lo", self.mask.lo), ("hi", self.mask.hi)):
            if side is not None and (not isinstance(side, int) or isinstance(side, bool)):
                raise ValueError(f"mask.{name} must be int or None, got {side!r}")
        if self.ranks < 1:
            raise ValueError(f"a ring needs at least 1 rank, got {self.ranks}")
        fill = object.__setattr__
        if self.kv_local is None:
            fill(self, "kv_local", self.seq_local)
        if isinstance(self.layout, BalancedLayout):
            self._take_lengths_of(self.layout)
        if self.length is None:
            fill(self, "length", self.seq_local * self.ranks)
        if self.kv_length is None:
            fill(self, "kv_length", self.length if self.kv_local == self.seq_local else self.kv_local * self.ranks)
        self._check_lengths("length", self.length, "q", self.seq_local)
        self._check_lengths("kv_length", self.kv_length, "k", self.kv_local)
        if self.steps is not None:
            check_steps(self.steps)
            if self.steps[-1] >= self.ranks:
                raise ValueError(
                    f"steps are shifts between {self.ranks} ranks, 0 to {self.ranks - 1}, got {self.steps}: leave out the others"
                )

    def _take_lengths_of(self, layout: BalancedLayout) -> None:
        """Set missing lengths to that of a balanced layout, and check ranks, shards and lengths against it."""
        for name in ("length", "kv_length"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, layout.length)
            layout.check(self.ranks, getattr(self, name))
        if not self.seq_local == self.kv_local == layout.seq_local:
            raise ValueError(
                f"each shard of this balanced layout has {layout.seq_local} tokens, got {self.seq_local} in q and "
                f"{self.kv_local} in k: shard with to_layout or shard_batch, by this layout"
            )

    def _check_lengths(self, name: str, length: int, array: str, local: int) -> None:
        layout = "contiguous" if isinstance(self.layout, BalancedLayout) else self.layout  # both have equal shards of any size
        needed = layouts.slots(layout)
        held = local * self.ranks
        if local % needed:
            padded = layouts.padded_local(layout, self.ranks, held) * self.ranks
            raise ValueError(
                f"{self.layout} over {self.ranks} ranks needs an even number of tokens a rank, got {local} ({held} in all) "
                f"in {array}: shard with to_layout, which pads to {padded}, and pass {name}={min(length, held)}"
            )
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise ValueError(
                f"{name} is the true global number of tokens, an int of at least 0 (static under jit), got "
                + number_in_words(length)
            )
        if length > held:
            raise ValueError(
                f"{name}={length} is more than the {self.ranks} shards of {array} hold ({local} tokens each, {held} in all): "
                f"pass every rank a shard of at least {layouts.padded_local(layout, self.ranks, length)} tokens"
            )

    @cached_property
    def q_runs(self) -> tuple[tuple[tuple[int, int, int, int], ...], ...]:
        """Return the query runs of each rank, as tuples (base, length, start, stride)."""
        return tuple(self._runs(rank, self.seq_local, self.length) for rank in range(self.ranks))

    @cached_property
    def k_runs(self) -> tuple[tuple[tuple[int, int, int, int], ...], ...]:
        return tuple(self._runs(rank, self.kv_local, self.kv_length) for rank in range(self.ranks))

    def _runs(self, rank: int, local: int, length: int) -> tuple[tuple[int, int, int, int], ...]:
        if isinstance(self.order, BalancedLayout):
            return self.order.padded_runs(rank)
        slots = layouts.find_layout(self.order)(rank, self.ranks, local)
        kept = [slot.before(length) for slot in slots]
        return tuple((i * slots[0].length, run.length, run.start, run.stride) for i, run in enumerate(kept))

    def positions(self, rank: int) -> list[int]:
        """Return the global positions of a rank's queries, padding included, in shard order; padding has positions >= length."""
        if isinstance(self.layout, BalancedLayout):
            return self.layout.positions(rank)
        slots = layouts.find_layout(self.layout)(rank, self.ranks, self.seq_local)
        return [position for slot in slots for position in slot.positions()]

    @property
    def order(self) -> str | BalancedLayout:
        """Return the layout, or "contiguous" for one rank with a named layout: the positions are the same, in a single run."""
        return self.layout if self.ranks > 1 or isinstance(self.layout, BalancedLayout) else "contiguous"

    @property
    def q_slot(self) -> int:
        """Return the tokens, with padding, that a query shard reserves for each run; in a balanced layout the whole shard is one
        slot."""
        return self.seq_local if isinstance(self.order, BalancedLayout) else self.seq_local // layouts.slots(self.order)

    @property
    def k_slot(self) -> int:
        return self.kv_local if isinstance(self.order, BalancedLayout) else self.kv_local // layouts.slots(self.order)

    @cached_property
    def band(self) -> Band:
        """Return the mask with its bounds clamped to the tokens in all shards, which keeps the arithmetic in int32 for a traced
        rank too."""
        return self.mask.clamped(max(self.seq_local, self.kv_local) * self.ranks)

    @property
    def band_of_one_run(self) -> Band | None:
        """Return ``band`` if the layout is balanced, else None.

        If it is not None, ``attend/one_run.py`` converts each step so that the kernels get shards of one run.
        """
        return self.band if isinstance(self.layout, BalancedLayout) else None

    def rows(self, rank: int, shift: int) -> Rows:
        """Return what a kernel reads: ``rows[i][j]``, the ``Row`` of integers (runs.py) for query run i and key run j.

        The query runs are those of ``rank``, the key runs those of ``rank - shift``.
        """
        known = self._rows.get((rank, shift))
        if known is None:
            runs = self.q_runs[rank], self.k_runs[(rank - shift) % self.ranks]
            if isinstance(self.layout, BalancedLayout):
                return recent_rows(*runs, self.band, self.q_slot, self.k_slot)
            known = self._rows[rank, shift] = rows_of(*runs, self.band, self.q_slot, self.k_slot)
        return known

    @cached_property
    def _rows(self) -> dict[tuple[int, int], Rows]:
        return {}

    def area(self, rank: int, shift: int) -> int:
        """Return the number of (query, key) pairs that ``rank`` sees at ``shift`` under the mask alone, without extents."""
        return sum(
            self.mask.onto(Run(q_start, q_len, stride), Run(k_start, k_len, stride)).area(q_len, k_len)
            for _, q_len, q_start, stride in self.q_runs[rank]
            for _, k_len, k_start, _ in self.k_runs[(rank - shift) % self.ranks]
        )

    def _meets(self, rank: int, shift: int) -> bool:
        """Return whether ``rank`` computes a (query, key) pair at ``shift``: whether ``area`` is above 0."""
        return any(
            self.mask.onto(Run(q_start, q_len, stride), Run(k_start, k_len, stride)).area(q_len, k_len)
            for _, q_len, q_start, stride in reversed(self.q_runs[rank])  # the last queries see the most keys
            for _, k_len, k_start, _ in self.k_runs[(rank - shift) % self.ranks]
        )

    def work(self, rank: int) -> int:
        """Return the number of (query, key) pairs that ``rank`` computes in all steps."""
        return sum(self.area(rank, shift) for shift in self.shifts)

    @property
    def balance(self) -> float:
        """Return the largest work of a rank divided by the mean work. 1 is perfect; the ring's time grows with this ratio."""
        work = [self.work(rank) for rank in range(self.ranks)]
        return max(work) * self.ranks / sum(work) if sum(work) else 1.0

    @cached_property
    def blanks(self) -> bool:
        """Return whether some query, true or padding, may be blank. Return True if ``steps`` is set: it may leave out shifts."""
        if self.steps is not None:
            return True  # a query may see keys only at the shifts that are left out
        return self.length < self.seq_local * self.ranks or not self._all_meet(self.mask, self.length, self.kv_length)

    @cached_property
    def blank_keys(self) -> bool:
        """Return whether some key, true or padding, may be blank. Return True if ``steps`` is set: it may leave out shifts."""
        band_of_keys = Band(*(None if side is None else -side for side in (self.mask.hi, self.mask.lo)))
        if self.steps is not None:
            return True
        return self.kv_length < self.kv_local * self.ranks or not self._all_meet(band_of_keys, self.kv_length, self.length)

    @staticmethod
    def _all_meet(band: Band, tokens: int, others: int) -> bool:
        """Return whether each of ``tokens`` queries, tested by first and last, sees one of the first ``others`` keys."""
        return all(band.onto(Run(p, 1), Run(0, others)).area(1, others) for p in (0, tokens - 1) if tokens)

    @cached_property
    def by_counter(self) -> bool:
        """Return whether the positions of each run have stride 1 and start at a multiple of ``dropout.SPAN``, which is 16.

        Then one GPU thread holds all 8 probabilities that share a Philox counter, and calls Philox once (``dropout.py``).
        """
        return all(not start % SPAN and stride == 1 for runs in self.q_runs + self.k_runs for _, _, start, stride in runs)

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        """Return the number of ranks that k/v have travelled at each step."""
        if self.steps is not None:
            return self.steps
        return (0, *(s for s in range(1, self.ranks) if any(self._meets(rank, s) for rank in range(self.ranks))))

    @cached_property
    def hops(self) -> tuple[int, ...]:
        """Return the number of ranks that k/v advance between each step and the next; there is one hop fewer than steps."""
        return tuple(b - a for a, b in zip(self.shifts, self.shifts[1:], strict=False))

    @property
    def ways(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return two tuples: the shifts of keys that go forward round the ring, and of keys that go backward, nearest first.

        Keys take the shorter direction, or go forward if both are equally long. Shift 0 is in neither tuple.
        """
        near = tuple(shift for shift in self.shifts[1:] if 2 * shift <= self.ranks)
        return near, self.shifts[: len(near) : -1]

    @property
    def travels(self) -> bool:
        """Return whether some rank needs the keys of another rank."""
        return bool(self.hops)

    @property
    def home(self) -> int:
        """Return the number of ranks that the gradients of a key shard advance, after the shard's last step, to its owner."""
        return -self.shifts[-1] % self.ranks


def rows_of(q_runs: Runs, k_runs: Runs, band: Band, q_slot: int, k_slot: int) -> Rows:
    return tuple(tuple(row(q, k, band, q_slot, k_slot) for k in k_runs) for q in q_runs)


# With packed documents a rank has 30 runs or more, and the rows of a step take 200 KB: too much to keep in each batch's plan.
recent_rows = lru_cache(maxsize=256)(rows_of)
