"""The leak probe: change one token at a time, and find the results and gradients that move although the mask hides that token.

It needs no truth and no tolerance: what a token cannot reach keeps its bits, or moves no more than between two equal runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ring_attn_core.reference.oracle import visible

from .cases import Arrays, Case
from .comparison import Contestant, choose_contestants, find_installed
from .messages import Change, join
from .oracles import ORACLES
from .pool import Pool
from .sweep import Sweep
from .variants import FRAMEWORKS, TITLES

KEY, QUERY, PADDING = ("k", "v"), ("q", "out", "lse"), ("q", "k", "v")
"""The arrays of a change: the key and value of a token; its query and the gradients of its results; the padding."""
KINDS = {KEY: "key", QUERY: "query", PADDING: "padding"}
OF_QUERIES, OF_KEYS = ("out", "lse", "dq"), ("dk", "dv")
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
        what = "the padding" if self.changed is None else f"the {self.kind} of token {self.changed} (rank {self.ranks[0]})"
        apart = "" if self.changed is None else f", {abs(self.token - self.changed)} tokens {self._side}"
        others = f" and {self.tokens - 1} more" if self.tokens > 1 else ""
        return f"{what} moves {self.array} of token {self.token} (rank {self.ranks[1]}){apart}{others}, by {self.largest:.2g}"

    @property
    def _side(self) -> str:
        return "later" if self.changed is not None and self.token > self.changed else "earlier"


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
        where = f"{self.variant}, {TITLES[self.framework]}, {self.ranks} ranks, {self.case.mask}, {self.case.layout}"
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
            changes, leaks = _probe(pool, each)
            found.append(Probed(each.variant.name, each.framework, each.ranks, each.case, changes, tuple(leaks)))
    return tuple(found)


def _probe(pool: Pool, one: Contestant) -> tuple[int, list[Leak]]:
    """Return the number of changes and what leaks."""
    case, plan = one.case, one.case.plan(one.ranks)
    rank_of = {position: rank for rank in range(one.ranks) for position in plan.positions(rank)}
    run = lambda kind, change=None: join(
        pool.ask(one.framework, one.request(kind, change)), ORACLES[one.variant.oracle].sharded, plan
    )
    before, again = run("prepare"), run("repeat")
    noise = {name: float(np.max(_apart(again[name], x))) for name, x in before.items()}
    seen = visible(case.band, range(case.length), range(case.length), **case.masks)
    changes = [Change(kind, token) for token in _tokens(case, one.ranks) for kind in (KEY, QUERY)]
    if plan.seq_local * plan.ranks > case.length:
        changes.append(Change(PADDING, None))
    leaks = []
    for change in changes:
        after = run("repeat", change)
        for name, token, largest, tokens in _moved(before, after, noise, _reach(seen, change)):
            ranks = None if change.token is None else rank_of[change.token], rank_of[token]
            leaks.append(Leak(KINDS[change.names], change.token, name, token, ranks, largest, tokens))
    pool.ask(one.framework, one.request("forget"))
    return len(changes), leaks


def _tokens(case: Case, ranks: int) -> list[int]:
    """Return the tokens to change: the edges of every rank's runs and of the first row's documents, a masked key, and others."""
    plan = case.plan(ranks)
    held = [plan.positions(rank) for rank in range(ranks)]
    edges = {p for mine in held for p in mine if p - 1 not in mine or p + 1 not in mine}
    edges |= {edge for first, end in case.masks.get("extents", np.zeros((1, 0, 2), int))[0].tolist() for edge in (first, end - 1)}
    hidden = np.flatnonzero(~case.masks["key_mask"][0])[:1].tolist() if "key_mask" in case.masks else []
    drawn = np.random.default_rng((case.seed, 7)).choice(case.length, min(DRAWN, case.length), replace=False).tolist()
    return sorted(p for p in {*edges, *hidden, *drawn} if p < case.length)


def _reach(seen: np.ndarray, change: Change) -> Arrays:
    """Return where ``change`` may move each result and gradient, bool [batch, tokens]. ``seen``: [batch, queries, keys]."""
    queries = keys = np.zeros((seen.shape[0], seen.shape[1]), bool)
    if change.names == KEY:
        queries = seen[:, :, change.token]
        keys = (queries[:, :, None] & seen).any(1)  # a query that sees the changed key weighs its other keys anew
    elif change.names == QUERY:
        queries = queries.copy()
        queries[:, change.token], keys = True, seen[:, change.token]
    return dict.fromkeys(OF_QUERIES, queries) | dict.fromkeys(OF_KEYS, keys)


def _moved(before: Arrays, after: Arrays, noise: dict[str, float], reach: Arrays) -> Iterator[tuple[str, int, float, int]]:
    """Yield (array, first token, largest difference, tokens) of each array that moved beyond ``noise`` outside of its reach."""
    for name, allowed in reach.items():
        if name in before:
            apart = _apart(after[name], before[name])
            by_token = np.where(allowed, 0, apart.reshape(*apart.shape[:2], -1).max(2)).max(0)
            if (moved := np.flatnonzero(by_token > 4 * noise[name])).size:
                yield name, int(moved[0]), float(by_token.max()), moved.size


def _apart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the absolute difference, 0 where both are equal or NaN, and infinity where one alone is NaN."""
    with np.errstate(invalid="ignore"):
        return np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, np.nan_to_num(np.abs(x - y), nan=np.inf))
