"""The leak probe: change one token at a time, and find the results and gradients that move although the mask hides that token.

It needs no truth and no tolerance: what a token cannot reach keeps its bits, or moves no more than between two equal runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.reference.oracle import visible

from .cases import Case
from .comparison import Contestant, choose_contestants, find_installed
from .messages import Change, join
from .oracles import ORACLES
from .pool import Pool
from .sweep import Sweep
from .variants import FRAMEWORKS, TITLES

KEY, QUERY, PADDING = ("k", "v"), ("q", "out", "lse"), ("q", "k", "v")
"""The arrays of a change: the key and value of a token; its query and the gradients of its results; the padding."""
KINDS = {KEY: "key", QUERY: "query", PADDING: "padding"}
DRAWN = 8
"""Tokens drawn at random, beside the edges of every rank's runs and of every document."""


@dataclass(frozen=True)
class Leak:
    """An array that moved at ``token`` although it must not, by ``largest``, when the ``kind`` of ``changed`` changed.
    ``changed``: a token, None for the padding. ``ranks``: those that hold ``changed`` (or None) and ``token``. ``tokens``: how
    many moved so."""

    kind: str
    changed: int | None
    array: str
    token: int
    ranks: tuple[int | None, int]
    largest: float
    tokens: int

    def __str__(self) -> str:
        what, apart = "the padding", ""
        if self.changed is not None:
            what = f"the {self.kind} of token {self.changed} (rank {self.ranks[0]})"
            side = "later" if self.token > self.changed else "earlier"
            apart = f", {abs(self.token - self.changed)} tokens {side}"
        others = f" and {self.tokens - 1} more" if self.tokens > 1 else ""
        return f"{what} moves {self.array} of token {self.token} (rank {self.ranks[1]}){apart}{others}, by {self.largest:.2g}"


@dataclass(frozen=True)
class Probed:
    """The leaks of one variant in one framework on a ring; ``changes``: the number of changes that were tried."""

    variant: str
    framework: str
    ranks: int
    case: Case
    changes: int
    leaks: tuple[Leak, ...]

    def __str__(self) -> str:
        ring = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        where = f"{self.variant}, {TITLES[self.framework]}, {ring}, {self.case.mask}, {self.case.layout}"
        if not self.leaks:
            return f"{where}: nothing leaks in {self.changes} changes"
        changed = len({(leak.kind, leak.changed) for leak in self.leaks})
        first = {(leak.kind, leak.array): leak for leak in reversed(self.leaks)}
        return "\n  ".join([f"{where}: {changed} of {self.changes} changes leak", *map(str, reversed(first.values()))])


def probe(sweep: Sweep, tell: Callable[[str], None] = lambda words: None) -> tuple[Probed, ...]:
    """Probe every variant of the sweep on each of its rings. Raise ValueError if one takes other inputs than q, k and v."""
    if other := [variant.name for variant in sweep.variants if variant.oracle != "attention"]:
        raise ValueError(f"--leak knows what attention on q, k and v may see: leave out {', '.join(other)}")
    cells, _ = choose_contestants(sweep, find_installed(sweep))
    asked = [each for cell in cells for each in cell if each.ranks in sweep.ranks]
    needed = tuple(name for name in FRAMEWORKS if any(each.framework == name for each in asked))
    found = []
    with Pool(needed, sweep.ranks, sweep.cases[0].device, sweep.patience) as pool:
        for each in asked:
            tell(f"{each.variant.name} in {TITLES[each.framework]}, {each.ranks} ranks, {each.case.length} tokens")
            changes = _changes(each.case, each.case.plan(each.ranks))
            leaks = tuple(_leaks(pool, each, changes))
            found.append(Probed(each.variant.name, each.framework, each.ranks, each.case, len(changes), leaks))
    return tuple(found)


def _leaks(pool: Pool, one: Contestant, changes: list[Change]) -> Iterator[Leak]:
    """Make each change, and yield each array that moves where the mask hides the change, at its first token."""
    case, plan, sharded = one.case, one.case.plan(one.ranks), ORACLES[one.variant.oracle].sharded
    run = lambda kind, change=None: join(pool.ask(one.framework, one.request(kind, change)), sharded, plan)
    rank_of = {position: rank for rank in range(one.ranks) for position in plan.positions(rank)}
    before, again = run("prepare"), run("repeat")
    noise = {name: _apart(again[name], x).max() for name, x in before.items()}
    seen = visible(case.band, range(case.length), range(case.length), **case.masks)
    for change in changes:
        after = run("repeat", change)
        for name, allowed in zip(("out", "lse", "dq", "dk", "dv"), _reach(seen, change), strict=True):
            apart = np.where(allowed, 0, _apart(after[name], before[name])).max(0) if name in before else np.zeros(1)
            if (moved := np.flatnonzero(apart > 4 * noise.get(name, 0))).size:
                ranks = None if change.token is None else rank_of[change.token], rank_of[int(moved[0])]
                yield Leak(KINDS[change.names], change.token, name, int(moved[0]), ranks, float(apart.max()), moved.size)
    pool.ask(one.framework, one.request("forget"))


def _changes(case: Case, plan: RingPlan) -> list[Change]:
    """Return the changes to try: the edges of every rank's runs and of the first row's documents, a masked key, and others."""
    held = [{p for p in plan.positions(rank) if p < case.length} for rank in range(plan.ranks)]
    edges = {p for mine in held for p in mine if p - 1 not in mine or p + 1 not in mine}
    edges |= {edge for first, end in case.masks.get("extents", np.zeros((1, 0, 2), int))[0].tolist() for edge in (first, end - 1)}
    hidden = np.flatnonzero(~case.masks["key_mask"][0])[:1].tolist() if "key_mask" in case.masks else []
    drawn = np.random.default_rng((case.seed, 7)).choice(case.length, min(DRAWN, case.length), replace=False).tolist()
    tokens = sorted({*edges, *hidden, *drawn})
    padding = [Change(PADDING, None)] if plan.seq_local * plan.ranks > case.length else []
    return [Change(kind, token) for token in tokens for kind in (KEY, QUERY)] + padding


def _reach(seen: np.ndarray, change: Change) -> Sequence[np.ndarray]:
    """Return where ``change`` may move out, lse, dq, dk and dv, bool [batch, tokens]. ``seen``: [batch, queries, keys]."""
    queries = keys = np.zeros(seen.shape[:2], bool)
    if change.names == KEY:
        queries = seen[:, :, change.token]
        keys = (queries[:, :, None] & seen).any(1)  # a query that sees the changed key weighs its other keys anew
    elif change.names == QUERY:
        queries, keys = queries | (np.arange(seen.shape[1]) == change.token), seen[:, change.token]
    return queries, queries, queries, keys, keys


def _apart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the largest absolute difference of each token, 0 where both are equal or NaN, infinity where one alone is NaN."""
    with np.errstate(invalid="ignore"):
        apart = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, np.nan_to_num(np.abs(x - y), nan=np.inf))
    return apart.reshape(*x.shape[:2], -1).max(2)
