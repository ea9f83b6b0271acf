"""The strategies by which ranks send keys: their names, option records and plans, and reasons why one cannot run a call.

Their code is in ``ring/strategies/`` of both packages. CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from ..plan.balanced_layout import BalancedLayout
from ..plan.direct import DirectPlan
from ..plan.global_order import GlobalPlan
from ..plan.joined import Gather, JoinedPlan
from ..plan.needed import NeededPlan
from ..plan.ring import RingPlan
from ..plan.two_level import TwoLevel, TwoLevelPlan
from ..plan.ulysses import HeadSplit, Ulysses
from ..validation import in_words

STRATEGIES = ("auto", "ring", "direct", "two_way", "gather", "ulysses", "two_level", "push")
RECORDS = {"gather": Gather, "ulysses": Ulysses, "two_level": TwoLevel}

ORDERS = "ring", "global"
IN_GLOBAL_ORDER = "global_order"
"""The name of the strategy by which both packages run ``order="global"``. It is not an argument."""

Strategy = str | Gather | Ulysses | TwoLevel
"""The name of a strategy, or a record of its options."""


def check_strategy(strategy: Any) -> None:
    if strategy == "pull":
        raise ValueError("strategy='pull' is gone: take strategy='push', which was measured to be as fast or faster")
    if not isinstance(strategy, tuple(RECORDS.values())) and strategy not in STRATEGIES:
        raise ValueError(
            f"unknown strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}, or a record such as Ulysses(ranks=2)"
        )


def check_order(order: Any, strategy: Strategy = "auto") -> None:
    if not isinstance(order, str) or order not in ORDERS:
        raise ValueError(f'order must be "ring" or "global", got {in_words(order)}')
    if order == "global" and isinstance(strategy, Gather):
        raise ValueError(
            f'strategy={strategy!r} gathers keys by groups of heads, and order="global" gathers queries too, all heads at once: '
            'pass strategy="gather" or "auto", or order="ring"'
        )
    if order == "global" and strategy not in ("auto", "gather"):
        raise ValueError(
            f"strategy={strategy!r} adds keys in the order in which they arrive, which follows the ranks, so it cannot keep "
            'order="global": pass strategy="gather" or "auto", or order="ring"'
        )


def read_strategy(text: str) -> Strategy:
    """Return the strategy with ``str(strategy) == text``, such as "ring" or Ulysses(ranks=2). A name is not checked."""
    found = re.fullmatch(r"(\w+)\((\w+)=(\d+)\)", text)
    makes: dict[str, Any] = {record.__name__: record for record in RECORDS.values()}
    return makes[found[1]](**{found[2]: int(found[3])}) if found else text


def name_of(strategy: Strategy) -> str:
    """Return the name of the strategy; "ring" for "auto", which takes "ring" on an unknown machine."""
    is_record = not isinstance(strategy, str)
    name = next(name for name, record in RECORDS.items() if type(strategy) is record) if is_record else str(strategy)
    return "ring" if name == "auto" else name


def resolve_strategy(strategy: Strategy, plan: RingPlan) -> str:
    """Return the name of the strategy that runs a call: "ring" if ``plan`` moves no keys, else the name of ``strategy``."""
    return name_of(strategy) if plan.travels or strategy == IN_GLOBAL_ORDER else "ring"


def plan_of_steps(strategy: Strategy, plan: RingPlan, heads: int, kv_heads: int, extents: bool) -> RingPlan:
    """Return the plan that the strategy's steps follow; it is ``plan`` if no keys travel."""
    name, own = resolve_strategy(strategy, plan), {field.name: getattr(plan, field.name) for field in fields(RingPlan)}
    if name == "direct" and isinstance(plan.layout, BalancedLayout):
        return NeededPlan(**own, by_documents=extents)
    if name == "direct":
        return DirectPlan(**own)
    if name == IN_GLOBAL_ORDER:
        return GlobalPlan(**own, q_shards=plan.ranks, k_shards=plan.ranks)
    if name == "gather":
        return JoinedPlan(**own, k_shards=plan.ranks, groups=groups_of(strategy))
    if name == "ulysses":
        size = group_of(strategy, plan.ranks)
        return JoinedPlan(**own, q_shards=size, k_shards=size, head_split=HeadSplit(heads, kv_heads, size))
    if name == "two_level":
        return TwoLevelPlan(**own, host_ranks=group_of(strategy, plan.ranks))
    return plan


def check_fit(strategy: Strategy, ranks: int, heads: int, kv_heads: int) -> None:
    if (why := objection(strategy, ranks, heads, kv_heads)) is not None:
        raise ValueError(f'strategy={strategy!r} cannot run this: {why}. strategy="auto" takes one that can')


def objection(strategy: Strategy, ranks: int, heads: int, kv_heads: int) -> str | None:
    """Return why the strategy cannot run with this number of ranks, query heads or key heads; None if it can."""
    size, name = group_of(strategy, ranks), name_of(strategy)
    if kv_heads % groups_of(strategy):
        return f"{kv_heads} key heads cannot be cut into {groups_of(strategy)} equal groups; Gather(groups=n) takes a divisor"
    if name == "ulysses" and ranks % size:
        return f"groups of {size} ranks do not divide a ring of {ranks}"
    if name == "ulysses" and heads % size:
        return f"{heads} query heads cannot be dealt evenly to {size} ranks; Ulysses(ranks=n) takes an n that divides both"
    if name == "two_level" and isinstance(strategy, str):
        return "how many ranks a host has is not known, pass TwoLevel(ranks=n)"
    return f"hosts of {size} ranks do not divide a ring of {ranks}" if name == "two_level" and ranks % size else None


def check_device(strategy: Strategy, framework: str, device: str) -> None:
    if name_of(strategy) != "push":
        return
    if framework == "jax":
        raise ValueError(
            f"strategy={strategy!r} copies between the memory of GPUs, which JAX leaves to XLA: it exists in PyTorch only. "
            'strategy="direct" sends keys straight from their owner too'
        )
    if device != "cuda":
        raise ValueError(
            f"strategy={strategy!r} copies between the memory of GPUs, and q is on {device!r}: move the tensors to GPUs of one "
            'host, or pass strategy="auto", which takes one that can'
        )


def group_of(strategy: Strategy, ranks: int) -> int:
    """Return the number of ranks in a group: ``ranks`` of the strategy's record, or all ranks if it has none."""
    return getattr(strategy, "ranks", ranks)


def groups_of(strategy: Strategy) -> int:
    """Return the number of groups of key heads, each with a step of its own."""
    return strategy.groups if isinstance(strategy, Gather) else 1
