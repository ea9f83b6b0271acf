"""The strategies by which keys travel: their names and records, the plans of their steps, and their objections in words.

The strategies themselves are in ``ring/strategies/`` of both packages; CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from ..plan.balanced_layout import BalancedLayout
from ..plan.direct import DirectPlan
from ..plan.joined import JoinedPlan
from ..plan.ring import RingPlan
from ..plan.ulysses import HeadShares, Ulysses

STRATEGIES = ("auto", "ring", "direct", "two_way", "gather", "ulysses")


Strategy = str | Ulysses
"""The name of a strategy, or a record of its options."""


def check_strategy(strategy: Any) -> None:
    """Raise ValueError if the strategy is unknown."""
    if not isinstance(strategy, Ulysses) and strategy not in STRATEGIES:
        raise ValueError(
            f"unknown strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}, or a record such as Ulysses(ranks=2)"
        )


def read_strategy(text: str) -> Strategy:
    """Return the strategy whose ``str`` is ``text``."""
    found = re.fullmatch(r"Ulysses\(ranks=(\d+)\)", text)
    return Ulysses(ranks=int(found[1])) if found else text


def name_of(strategy: Strategy) -> str:
    """Return the name of the strategy; "auto" stands for "ring"."""
    name = "ulysses" if isinstance(strategy, Ulysses) else strategy
    return "ring" if name == "auto" else name


def chosen(strategy: Strategy, plan: RingPlan) -> str:
    """Return the name of the strategy that runs a call with this plan: "ring" if no keys have to travel."""
    return name_of(strategy) if plan.travels else "ring"


def plan_of_steps(strategy: Strategy, plan: RingPlan, heads: int, kv_heads: int) -> RingPlan:
    """Return the plan of the steps: ``plan``, or that of the shards which the strategy joins before the first step."""
    name, own = chosen(strategy, plan), {field.name: getattr(plan, field.name) for field in fields(RingPlan)}
    if name == "direct":
        return DirectPlan(**own)
    if name == "gather":
        return JoinedPlan(**own, k_shards=plan.ranks)
    if name == "ulysses":
        size = _group(strategy, plan.ranks)
        return JoinedPlan(**own, q_shards=size, k_shards=size, shares=HeadShares(heads, kv_heads, size))
    return plan


def check_fit(strategy: Strategy, ranks: int, heads: int, layout: str | BalancedLayout) -> None:
    """Raise ValueError if the strategy cannot run on so many ranks or query heads, or in this layout."""
    objection = _of_ulysses(_group(strategy, ranks), ranks, heads) if name_of(strategy) == "ulysses" else None
    if name_of(strategy) == "direct" and isinstance(layout, BalancedLayout):
        objection = "its slices are cut from runs of equal length, and those of a balanced layout are of any length"
    if objection is not None:
        raise ValueError(f'strategy={strategy!r} cannot run this: {objection}. strategy="auto" takes {name_of("auto")!r}')


def _of_ulysses(size: int, ranks: int, heads: int) -> str | None:
    if ranks % size:
        return f"groups of {size} ranks do not divide a ring of {ranks}"
    if heads % size:
        return f"{heads} query heads cannot be dealt evenly to {size} ranks; Ulysses(ranks=n) takes an n that divides both"
    return None


def _group(strategy: Strategy, ranks: int) -> int:
    return strategy.ranks if isinstance(strategy, Ulysses) else ranks
