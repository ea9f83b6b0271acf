"""Messages between the pool and a framework's processes: a request for an action, and an outcome with NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ring_attn_core.plan.ring import RingPlan

from .cases import Arrays, Case

CHANGED = 3.0
"""A changed number is this one less the number; changed padding is this number."""


@dataclass(frozen=True)
class Change:
    """A change of a call's inputs at one ``token``, in every row; None: of the padding. ``names``: arrays and cotangents."""

    names: tuple[str, ...]
    token: int | None

    def apply(self, arrays: Arrays) -> Arrays:
        """Return the global ``arrays`` with the change; padding has no place in them."""
        changed = {name: x.copy() for name, x in arrays.items() if name in self.names and self.token is not None}
        for x in changed.values():
            x[:, self.token] = CHANGED - x[:, self.token]
        return arrays | changed

    @property
    def paddings(self) -> dict[str, Any]:
        return dict.fromkeys(self.names, CHANGED) if self.token is None else {}


@dataclass(frozen=True)
class Request:
    """A request to the processes of a framework.
    ``kind``: "prepare" builds the call by ``build`` and runs it once; "repeat" (with ``change``), "time", "memory" and "forget"
    act on it. ``user``: a user's own ``module:function``. ``oracle``: the key in ``ORACLES`` for the inputs."""

    kind: str
    build: Callable[..., Any]
    case: Case
    ranks: int
    oracle: str
    user: str | None = None
    change: Change | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the key under which the prepared call is stored: the request without ``kind``, ``oracle`` and ``change``."""
        return self.build, self.case, self.ranks, self.user


@dataclass(frozen=True)
class Outcome:
    """A process's results of a run: ``shards`` by rank (one if replicated or summed), and the names of the cotangents used."""

    shards: dict[str, list[np.ndarray]]
    cotangents: frozenset[str]


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of each process. ``store``: file by which PyTorch's ranks meet. ``folder``: of a user's function."""

    rings: tuple[int, ...]
    device: str
    patience: float
    store: str
    folder: str

    @property
    def most(self) -> int:
        return max(self.rings)


def cut(x: np.ndarray, plan: RingPlan, pad: Any = 0) -> list[np.ndarray]:
    """Return one shard for each rank from a global array [batch, tokens, ...]; ``pad`` fills the padding."""
    missing = (x.shape[0], plan.seq_local * plan.ranks - x.shape[1], *x.shape[2:])
    padded = np.concatenate([x, np.full(missing, pad, x.dtype)], 1)
    return [np.ascontiguousarray(padded[:, list(plan.positions(rank))]) for rank in range(plan.ranks)]


def join(outcomes: Sequence[Outcome], sharded: frozenset[str], plan: RingPlan) -> Arrays:
    """Return global arrays in natural order: shards joined, other gradients summed, other results of rank 0."""
    order = np.argsort([position for rank in range(plan.ranks) for position in plan.positions(rank)])[: plan.length]
    whole = {}
    for name in outcomes[0].shards:
        shards = [shard for outcome in outcomes for shard in outcome.shards.get(name, [])]
        if name in sharded:
            whole[name] = np.concatenate(shards, 1)[:, order]
        else:
            whole[name] = np.sum(shards, 0) if name.startswith("d") else shards[0]
    return whole
