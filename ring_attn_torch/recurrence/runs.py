"""The runs of this rank's shard, the tokens before them, and the states that earlier runs leave: ``split_runs, halo, carry``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.plan.run_order import RunOrder
from ring_attn_core.problem.checks import check_along
from ring_attn_core.problem.recurrence import check_carry, check_extents_of, check_width, order_of

from ..ring.agreement import AgreedCall, agree_on
from ..ring.carry import apply_map, fold_runs
from ..ring.groups import Group, rank_in, ranks_of, ring_of
from ..ring.halo import exchange_halo

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Num

Ring = dist.ProcessGroup | DeviceMesh | None
Layout = str | BalancedLayout


def split_runs(
    x: Num[Tensor, "batch seq_local ..."], *, group: Ring = None, layout: Layout = "zigzag", length: int | None = None
) -> tuple[Num[Tensor, "batch tokens ..."], ...]:
    """Return this rank's runs of consecutive tokens, views of its shard ``x``, without padding; a run of padding is empty.

    Raise ValueError if ``x`` cannot be a shard of ``length`` tokens in ``layout``, or if the layout is striped.
    """
    shard = RunShard.of("split_runs", x, Where(group, layout, length))
    return tuple(x[:, base : base + n] for base, n, _ in shard.runs)


def halo(
    x: Num[Tensor, "batch seq_local ..."],
    width: int,
    *,
    group: Ring = None,
    layout: Layout = "zigzag",
    length: int | None = None,
    extents: Int[Tensor, "rows seq_local 2"] | None = None,
) -> Num[Tensor, "batch runs width ..."]:
    """Return the ``width`` tokens before each run of this rank, from the ranks that hold them: [batch, runs, width, ...].

    A token is 0 if it lies before the sequence, or in another document than the run's first token. ``extents``: this rank's shard
    of ``document_extents``, int [batch, seq_local, 2]; None: one document. ``layout``: "zigzag", "contiguous", or the ``.layout``
    of a balanced shard; ``runs`` is then the most that a rank has, and the halos of missing runs are 0.

    Differentiable: a token's gradient adds those of all its readers, in at least float32 and always in the same order. Each rank
    sends ``runs * width`` tokens, whatever the length. Raise ValueError, the same on every rank and before anything is sent, if
    ``width`` is below 1, the layout is striped, ``x`` cannot be a shard, or if ranks differ in shapes or arguments.
    """
    shard = RunShard.of("halo", x, Where(group, layout, length, extents), lambda _: check_width(width), width)
    return shard.mask_halo(exchange_halo(x, shard.order, int(width), shard.ring))


def carry(
    bias: Float[Tensor, "batch runs ..."],
    *,
    decay: Float[Tensor, "batch runs ..."] | None = None,
    transition: Float[Tensor, "batch runs ..."] | None = None,
    group: Ring = None,
    layout: Layout = "zigzag",
    length: int | None = None,
    extents: Int[Tensor, "rows seq_local 2"] | None = None,
) -> Float[Tensor, "batch runs ..."]:
    """Return the state before each run of this rank: what the earlier runs of its document leave.

        state after a run = transition @ (state before it) + bias      or      decay * (state before it) + bias

    ``bias`` [batch, runs, ..., K, V], float32 or float64: the state that each run makes of 0. ``decay`` has as many dims and
    broadcasts to it; ``transition`` is [batch, runs, ..., K, K]. Pass exactly one. All are of the last document of their run: if
    a document begins in a run, nothing of the state before it passes on, and if one begins with a run, its state is 0.

    ``group``, ``layout``, ``length`` and ``extents`` are those of :func:`halo`. Differentiable in bias and decay or transition.
    Matrices are multiplied in full precision, in a fixed order. Raise ValueError, the same on every rank and before anything is
    sent, if shapes do not fit, the dtype is lower, the layout is striped, or if ranks differ in shapes or arguments.
    """
    given = {"decay": decay, "transition": transition}
    shapes = {name: None if x is None else tuple(x.shape) for name, x in given.items()}

    def check(order: RunOrder) -> None:
        check_carry(tuple(bias.shape), str(bias.dtype).removeprefix("torch."), *shapes.values(), len(order.runs[0]))  # type: ignore[arg-type]

    where = Where(group, layout, length, extents)
    shard = RunShard.of("carry", bias, where, check, tuple(shapes.items()), tokens=False)
    a = (decay if transition is None else transition).to(bias.dtype)  # type: ignore[union-attr]
    heads = bias.shape[2:-2]
    flat = lambda x: x.expand(*bias.shape[:-2], *x.shape[-2:]).reshape(*bias.shape[:2], heads.numel(), *x.shape[-2:])
    a, b = shard.forget(flat(a)), flat(bias)
    states = shard.begin_fresh(fold_runs(a, b, shard.order, shard.ring, transition is not None))
    return states.unflatten(2, heads) if heads else states.squeeze(2)


def tie(x: Tensor, *arrays: Tensor) -> Tensor:
    """Return ``x``, tied to those ``arrays`` that hold no tokens: their backward takes part in what other ranks exchange."""
    return sum((each.sum() for each in arrays if not each.shape[1]), x)


class Where(NamedTuple):
    """The arguments of a public call that say which tokens its arrays hold, and what a cache adds, without gradients."""

    group: Ring
    layout: Layout
    length: int | None = None
    extents: Tensor | None = None
    last: bool = False  # whether to return the state after the tokens, whole on every rank
    initial: Tensor | None = None  # with ``last``: the state before the tokens, whole; of a convolution the tokens before them


@dataclass(frozen=True, eq=False)
class RunShard:
    """This rank's runs, with the documents of its tokens. ``begins``: int [rows, tokens], the first position of each token's
    document, or None; ``real``: bool [rows, tokens], False for padding, or None without padding."""

    order: RunOrder
    ring: Group
    begins: Tensor | None = None
    real: Tensor | None = None

    @classmethod
    def of(
        cls,
        call: str,
        x: Any,
        where: Where,
        check: Callable[[RunOrder], None] = lambda _: None,
        more: Any = None,
        tokens: bool = True,
    ) -> RunShard:
        """Check a call on all ranks, and return the shard of x [batch, tokens (or runs), ...]. ``more``: must be equal, too."""
        ring, extents = ring_of(where.group), where.extents
        orders: list[RunOrder] = []

        def check_all() -> None:
            check_along(x, isinstance(x, Tensor), "a torch.Tensor", 1)
            integers = isinstance(extents, Tensor) and not extents.dtype.is_floating_point
            check_extents_of(tuple(x.shape[: 1 + tokens]), None if extents is None else tuple(extents.shape), integers)
            local = x.shape[1] if tokens else None if extents is None else extents.shape[1]
            orders.append(order_of(where.layout, ranks_of(ring), local, where.length, extents is not None))
            check(orders[0])

        kind = (tuple(x.shape), str(x.dtype), x.device.type) if isinstance(x, Tensor) else ((), "", "cpu")
        alike = ("x_shape", kind[0]), ("dtype", kind[1]), ("layout", where.layout), ("length", where.length)
        agree_on(AgreedCall(call, kind[2], (*alike, ("extents", extents is not None), ("arguments", more))), ring, check_all)
        runs = orders[0].runs[rank_in(ring)]
        return cls(orders[0], ring, *_documents(runs, extents, x.shape[1] if tokens else None, x.device))

    @property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        return self.order.runs[rank_in(self.ring)]

    def zero_padding(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        """Set padding of arrays [batch, tokens, ...] to 0."""
        if self.real is None:
            return arrays
        return tuple(torch.where(self.real.view(*self.real.shape, *[1] * (x.ndim - 2)), x, 0) for x in arrays)

    def join(self, parts: list[Tensor]) -> Tensor:
        """Return the shard of which ``parts`` are the runs, with 0 for padding."""
        tokens = sum(part.shape[1] for part in parts) if self.real is None else self.real.shape[1]
        held = sorted(((run[0], part) for run, part in zip(self.runs, parts, strict=True) if run[1]), key=lambda pair: pair[0])
        pieces, end = [part for part in parts if not part.shape[1]], 0  # empty parts too: see tied
        for base, part in held:
            pieces += [part.new_zeros(part.shape[0], base - end, *part.shape[2:]), part]
            end = base + part.shape[1]
        pieces.append(parts[0].new_zeros(parts[0].shape[0], tokens - end, *parts[0].shape[2:]))
        return self.zero_padding(torch.cat(pieces, 1))[0]

    def documents_of(self, base: int, n: int, batch: int) -> Tensor | None:
        """Return the document of each token of a run, [batch, n], by its first position; None if they are all of one."""
        return None if self.begins is None else self.begins[:, base : base + n].expand(batch, -1)

    def mask_halo(self, tokens: Tensor) -> Tensor:
        """Set tokens of halos [batch, runs, width, ...] to 0 that are not of the document of their run's first token."""
        if self.begins is None:
            return tokens
        lag = torch.arange(tokens.shape[2], 0, -1, device=tokens.device)
        seen = torch.stack([start - lag >= self._begin(base)[:, None] for base, _, start in self.runs], 1)
        return torch.where(seen.view(*seen.shape, *[1] * (tokens.ndim - 3)), tokens, 0)

    def forget(self, a: Tensor) -> Tensor:
        """Set the maps [batch, runs, ...] of runs in which a document begins to 0."""
        return self._where([self._begin(base + max(n - 1, 0)) < start for base, n, start in self._known], a)

    def begin_fresh(self, states: Tensor) -> Tensor:
        """Set the states [batch, runs, ...] before runs that begin a document to 0."""
        return self._where([self._begin(base) < start for base, _, start in self._known], states)

    def states(self, a: Tensor | None, b: Tensor, where: Where, matrix: bool) -> tuple[Tensor, Tensor | None]:
        """Return the state before each run, and the state after the last one if ``where`` asks for it. ``a`` and ``b`` [batch,
        runs, heads, ...] are each run's map, as in ``fold_runs``; ``a`` is None if no run needs a state."""
        after = lambda i, state: b[:, i] if a is None else apply_map(a[:, i], state, matrix) + b[:, i]
        (rank, first), begun = self.order.order[0], b
        first = first if rank == rank_in(self.ring) else None
        if where.initial is not None and first is not None:
            begun = b.clone()
            begun[:, first] = after(first, where.initial)
        states = torch.zeros_like(b)
        if a is not None and self.order.slots:
            states = self.begin_fresh(fold_runs(self.forget(a), begun, self.order, self.ring, matrix))
        if where.initial is not None and first is not None:
            states[:, first] = where.initial
        if not where.last:
            return states, None
        owner, run = self.order.order[-1]
        end = after(run, states[:, run]).contiguous()
        if self.order.ranks > 1:
            dist.broadcast(end, group=self.ring, group_src=owner)
        return states, end

    def begin_after(self, halos: Tensor, before: Tensor | None) -> Tensor:
        """Put the tokens ``before`` [batch, width, ...] the first into the halos [batch, runs, width, ...] that reach them."""
        if before is not None:
            halos = halos.clone()
            for i, (_, n, start) in enumerate(self.runs):
                if n and start < halos.shape[2]:
                    halos[:, i, : halos.shape[2] - start] = before[:, start:]
        return halos

    @property
    def _known(self) -> tuple[tuple[int, int, int], ...]:
        return () if self.begins is None else self.runs

    def _begin(self, index: int) -> Tensor:
        assert self.begins is not None
        return self.begins[:, min(index, self.begins.shape[1] - 1)]

    @staticmethod
    def _where(kept: list[Tensor], x: Tensor) -> Tensor:
        return torch.where(torch.stack(kept, 1).view(-1, len(kept), *[1] * (x.ndim - 2)), x, 0) if kept else x


def _documents(
    runs: Any, extents: Tensor | None, tokens: int | None, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return ``begins`` and ``real`` of a shard of ``tokens`` tokens; without a number of tokens only ``begins``."""
    begins = None if extents is None else extents[..., 0].to(device)
    if tokens is None or (extents is None and sum(n for _, n, _ in runs) == tokens):
        return begins, None
    real = torch.zeros(1, tokens, dtype=torch.bool, device=device)
    for base, n, _ in runs:
        real[:, base : base + n].fill_(True)
    return begins, real if extents is None else real & (extents[..., 1] > extents[..., 0]).to(device)
