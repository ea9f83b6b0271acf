"""The runs of this rank's shard, the tokens before them, and the states that earlier runs leave: ``split_runs, halo, carry``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.plan.run_order import RunOrder
from ring_attn_core.problem.checks import check_along
from ring_attn_core.problem.recurrence import check_carry, check_extents_of, check_width, order_of

from ..axes import ring_size
from ..call.traced import TracedLayout
from ..ring.carry import apply_map, fold_runs
from ..ring.halo import exchange_halo, of_rank, take

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Num

Layout = str | BalancedLayout
INSIDE = "shard the arrays over it"


def split_runs(
    x: Num[Array, "batch seq_local ..."], *, axis_name: str = "seq", layout: Layout = "zigzag", length: int | None = None
) -> Num[Array, "batch runs tokens ..."]:
    """Return this rank's runs of consecutive tokens, [batch, runs, tokens, ...], with 0 for padding.

    ``tokens`` is the size of the longest run of any rank. Raise ValueError if ``x`` cannot be a shard of ``length`` tokens in
    ``layout``, or if the layout is striped.
    """
    return RunShard.of("split_runs", x, Where(axis_name, layout, length)).to_runs(x)


def halo(
    x: Num[Array, "batch seq_local ..."],
    width: int,
    *,
    axis_name: str = "seq",
    layout: Layout = "zigzag",
    length: int | None = None,
    extents: Int[Array, "rows seq_local 2"] | None = None,
) -> Num[Array, "batch runs width ..."]:
    """Return the ``width`` tokens before each run of this rank, from the ranks that hold them: [batch, runs, width, ...].

    A token is 0 if it lies before the sequence, or in another document than the run's first token. ``extents``: this rank's shard
    of ``document_extents``, int [batch, seq_local, 2]; None: one document. ``layout``: "zigzag", "contiguous", or the ``.layout``
    of a balanced shard; ``runs`` is then the most that a rank has, and the halos of missing runs are 0.

    Call it inside ``jax.shard_map`` over ``axis_name``. Differentiable: a token's gradient adds those of all its readers, in at
    least float32 and always in the same order. Each rank sends ``runs * width`` tokens, whatever the length. Raise ValueError if
    ``width`` is below 1, the layout is striped or traced, or ``x`` cannot be a shard.
    """
    shard = RunShard.of("halo", x, Where(axis_name, layout, length, extents), lambda _: check_width(width))
    return shard.mask_halo(exchange_halo(x, shard.order, int(width), axis_name))


def carry(
    bias: Float[Array, "batch runs ..."],
    *,
    decay: Float[Array, "batch runs ..."] | None = None,
    transition: Float[Array, "batch runs ..."] | None = None,
    axis_name: str = "seq",
    layout: Layout = "zigzag",
    length: int | None = None,
    extents: Int[Array, "rows seq_local 2"] | None = None,
) -> Float[Array, "batch runs ..."]:
    """Return the state before each run of this rank: what the earlier runs of its document leave.

        state after a run = transition @ (state before it) + bias      or      decay * (state before it) + bias

    ``bias`` [batch, runs, ..., K, V], float32 or float64: the state that each run makes of 0. ``decay`` has as many dims and
    broadcasts to it; ``transition`` is [batch, runs, ..., K, K]. Pass exactly one. All are of the last document of their run: if
    a document begins in a run, nothing of the state before it passes on, and if one begins with a run, its state is 0.

    ``axis_name``, ``layout``, ``length`` and ``extents`` are those of :func:`halo`. Differentiable in bias and decay or
    transition. Matrices are multiplied in full precision, in a fixed order. Raise ValueError if shapes do not fit, the dtype is
    lower, or the layout is striped or traced.
    """
    shapes = [None if x is None else x.shape for x in (decay, transition)]
    check = lambda order: check_carry(bias.shape, str(bias.dtype), *shapes, len(order.runs[0]))  # type: ignore[arg-type]
    shard = RunShard.of("carry", bias, Where(axis_name, layout, length, extents), check, tokens=False)
    a = (decay if transition is None else transition).astype(bias.dtype)  # type: ignore[union-attr]
    flat = lambda x: jnp.broadcast_to(x, (*bias.shape[:-2], *x.shape[-2:])).reshape(
        *bias.shape[:2], prod(bias.shape[2:-2]), *x.shape[-2:]
    )
    states = fold_runs(shard.forget(flat(a)), flat(bias), shard.order, axis_name, transition is not None)
    return shard.begin_fresh(states).reshape(bias.shape)


class Where(NamedTuple):
    """The arguments of a public call that say which tokens its arrays hold, and what a cache adds, without gradients."""

    axis_name: str
    layout: Layout
    length: int | None = None
    extents: jax.Array | None = None
    last: bool = False  # whether to return the state after the tokens, whole on every rank
    initial: jax.Array | None = None  # with ``last``: the state before the tokens, whole; of a convolution the tokens before them


@dataclass(frozen=True, eq=False)
class RunShard:
    """This rank's runs, with the documents of its tokens. ``begins``: int [rows, tokens], the first position of each token's
    document, or None; ``real``: bool [rows, tokens], False for padding."""

    order: RunOrder
    axis_name: str
    tokens: int
    begins: jax.Array | None = None
    real: jax.Array | None = None

    @classmethod
    def of(
        cls, call: str, x: Any, where: Where, check: Callable[[RunOrder], None] = lambda _: None, tokens: bool = True
    ) -> RunShard:
        """Check a call, and return its shard. ``x``: [batch, tokens, ...], or [batch, runs, ...] if not ``tokens``."""
        check_along(x, hasattr(x, "shape") and hasattr(x, "dtype"), "an array", 1)
        (axis_name, layout, length, extents), ranks = where[:4], ring_size(where.axis_name, call, INSIDE)
        if isinstance(layout, TracedLayout):
            raise ValueError(f"{call} takes a static layout: pass the shard's .layout, which compiles anew for other documents")
        integers = extents is not None and jnp.issubdtype(extents.dtype, jnp.integer)
        check_extents_of(x.shape[: 1 + tokens], None if extents is None else extents.shape, integers)
        local = x.shape[1] if tokens else None if extents is None else extents.shape[1]
        order = order_of(layout, ranks, local, length, extents is not None)
        check(order)
        shard = cls(order, axis_name, local or 0, None if extents is None else extents[..., 0])
        if not tokens:
            return shard
        real = (shard.back >= 0)[None]
        return replace(shard, real=real if extents is None else real & (extents[..., 1] > extents[..., 0]))

    @property
    def index(self) -> jax.Array:
        """Return the place in the shard of each token of each run, int [runs, longest run], -1 behind a run's end."""
        table = np.full((self.order.ranks, len(self.order.runs[0]), self.most), -1)
        for rank, runs in enumerate(self.order.runs):
            for i, (base, n, _) in enumerate(runs):
                table[rank, i, :n] = base + np.arange(n)
        return of_rank(table, self.axis_name)

    @property
    def most(self) -> int:
        return max(n for runs in self.order.runs for _, n, _ in runs)

    @property
    def back(self) -> jax.Array:
        """Return the place in all runs, padded to the longest, of each token of the shard, int [tokens]; -1 for padding."""
        table = np.full((self.order.ranks, self.tokens), -1)
        for rank, runs in enumerate(self.order.runs):
            for i, (base, n, _) in enumerate(runs):
                table[rank, base : base + n] = i * self.most + np.arange(n)
        return of_rank(table, self.axis_name)

    def _runs(self, column: int) -> jax.Array:
        return of_rank([[run[column] for run in runs] for runs in self.order.runs], self.axis_name)

    def to_runs(self, x: jax.Array) -> jax.Array:
        """Return [batch, tokens, ...] as [batch, runs, longest run, ...], 0 behind a run's end."""
        return take(x, self.index)

    def join(self, parts: jax.Array) -> jax.Array:
        """Invert ``to_runs``, with 0 for padding."""
        return self.zero_padding(take(parts.reshape(parts.shape[0], -1, *parts.shape[3:]), self.back))[0]

    def zero_padding(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Set padding of arrays [batch, tokens, ...] to 0."""
        assert self.real is not None
        return tuple(jnp.where(self.real.reshape(*self.real.shape, *[1] * (x.ndim - 2)), x, 0) for x in arrays)

    def documents(self, batch: int) -> jax.Array:
        """Return the document of each token of each run by its first position, [batch, runs, longest run]."""
        last = jnp.maximum(self.index.max(1, keepdims=True), 0)
        index = jnp.where(self.index < 0, last, self.index)
        rows = jnp.zeros((1, *index.shape), jnp.int32) if self.begins is None else jnp.take(self.begins, index, axis=1)
        return jnp.broadcast_to(rows, (batch, *index.shape))

    def positions(self) -> jax.Array:
        """Return the position of each token of each run, int [runs, longest run]."""
        return self._runs(2)[:, None] + jnp.arange(self.most)

    def mask_halo(self, tokens: jax.Array) -> jax.Array:
        """Set tokens of halos [batch, runs, width, ...] to 0 that are not of the document of their run's first token."""
        if self.begins is None:
            return tokens
        lag = jnp.arange(tokens.shape[2], 0, -1)
        seen = self._runs(2)[:, None] - lag >= self._begin(self._runs(0))[..., None]
        return jnp.where(seen.reshape(*seen.shape, *[1] * (tokens.ndim - 3)), tokens, 0)

    def forget(self, a: jax.Array) -> jax.Array:
        """Set the maps [batch, runs, ...] of runs in which a document begins to 0."""
        return self._where(self._runs(0) + jnp.maximum(self._runs(1) - 1, 0), a)

    def begin_fresh(self, states: jax.Array) -> jax.Array:
        """Set the states [batch, runs, ...] before runs that begin a document to 0."""
        return self._where(self._runs(0), states)

    def states(self, a: jax.Array | None, b: jax.Array, where: Where, matrix: bool) -> tuple[jax.Array, jax.Array | None]:
        """Return the state before each run, and the state after the last one if ``where`` asks for it. ``a`` and ``b`` [batch,
        runs, heads, ...] are each run's map, as in ``fold_runs``; ``a`` is None if no run needs a state."""
        here, initial = lambda rank: jax.lax.axis_index(self.axis_name) == rank, where.initial
        after = lambda i, state: b[:, i] if a is None else apply_map(a[:, i], state, matrix) + b[:, i]
        (rank, first), begun = self.order.order[0], b
        if initial is not None:
            begun = b.at[:, first].set(jnp.where(here(rank), after(first, initial), b[:, first]))
        states = jnp.zeros_like(b)
        if a is not None and self.order.slots:
            states = self.begin_fresh(fold_runs(self.forget(a), begun, self.order, self.axis_name, matrix))
        if initial is not None:
            states = states.at[:, first].set(jnp.where(here(rank), initial, states[:, first]))
        if not where.last:
            return states, None
        owner, run = self.order.order[-1]
        return states, jax.lax.psum(jnp.where(here(owner), after(run, states[:, run]), 0), self.axis_name)

    def begin_after(self, halos: jax.Array, before: jax.Array | None) -> jax.Array:
        """Put the tokens ``before`` [batch, width, ...] the first into the halos [batch, runs, width, ...] that reach them."""
        if before is None:
            return halos
        width = before.shape[1]
        place = self._runs(2)[:, None] + jnp.arange(width)
        reached = (place < width).reshape(*place.shape, *[1] * (before.ndim - 2))
        return jnp.where(reached, jnp.take(before, jnp.minimum(place, width - 1), axis=1), halos)

    def _begin(self, index: jax.Array) -> jax.Array:
        assert self.begins is not None
        return jnp.take(self.begins, jnp.minimum(index, self.begins.shape[1] - 1), axis=1)

    def _where(self, index: jax.Array, x: jax.Array) -> jax.Array:
        if self.begins is None:
            return x
        kept = self._begin(index) < self._runs(2)
        return jnp.where(kept.reshape(*kept.shape, *[1] * (x.ndim - 2)), x, 0)
