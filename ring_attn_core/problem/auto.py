"""The choice of ``strategy="auto"`` by the times that the cost model predicts, and the reason in a sentence.

The choice depends on facts that all ranks share: shapes, options, the names of the optional arrays, the machine and its hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..plan.balanced_layout import BalancedLayout
from ..plan.cost import memory, seconds
from ..plan.load import Load, Seconds
from ..plan.machine import NOISE, Machine
from ..plan.two_level import TwoLevel
from ..plan.ulysses import Ulysses
from .strategies import Strategy, group_of, name_of, objection

GAIN = 1.02
"""The least predicted speedup over the ring (the ring's time / the strategy's time) at which "auto" takes another strategy."""

MARGIN = 1.005
"""The least predicted speedup over the best strategy so far at which "auto" takes the next candidate.

If the best strategy so far is the ring, the limit is GAIN.
"""

ROOM = 1 / 16
"""The share of a rank's memory that a strategy may take in addition to the memory that the ring takes."""

JOINED = "gather", "ulysses"
"""The strategies that compute on joined shards. With extents they take up to 1.5 times as long as predicted."""

JOINED_GAIN = 1.15
"""The value that replaces GAIN for the strategies in ``JOINED``. It is larger because the slowdown of kernels on joined shards is
a constant of the model, which ``ring-attn doctor`` does not measure."""


HALF = 0.5
"""The largest share of keys at which "auto" takes "direct" in a balanced layout.

The share is ``Load.needed_share``: the keys that the busiest rank receives or sends, divided by those it receives in a ring.
"""


class Choice(NamedTuple):
    """A strategy, the reason for it, and predicted times by ``str(strategy)`` for each candidate that fits into memory."""

    strategy: Strategy
    why: str
    predicted: dict[str, Seconds]


def choose(load: Load, machine: Machine | None, backend: str, device: str) -> Choice:
    """Choose the strategy with the least predicted time within ROOM (extra memory), GAIN, JOINED_GAIN and MARGIN (least speedup).
    It is "ring" if no keys travel. A balanced layout takes "direct" only if ``load.needed`` is set and ``load.needed_share`` is
    at most HALF, then also without predicted times."""
    ring = lambda why: Choice("ring", why, {})
    if not load.plan.travels:
        return ring("no rank needs the keys of another, so nothing travels")
    balanced, unpredictable = isinstance(load.plan.layout, BalancedLayout), _unpredictable(load, machine, backend, device)
    if balanced and load.needed is None:
        return ring("the ring: it is not known that extents stay within the documents that the balanced layout was made for")
    if balanced and load.needed_share > HALF:
        return ring(f"the ring: {_needed(load)}, more than {HALF:.0%}")
    if unpredictable is not None or machine is None:
        return Choice("direct", f"direct: {_needed(load)}", {}) if balanced else ring(f"the ring: {unpredictable}")
    predicted: dict[str, Seconds] = {}
    fastest: Strategy = "ring"
    for strategy in candidates(load, machine):
        name, group = name_of(strategy), group_of(strategy, load.plan.ranks)
        if memory(name, load, group) - memory("ring", load) > ROOM * machine.memory:
            continue
        predicted[str(strategy)] = taken = seconds(name, load, machine, group)
        if name in JOINED and taken.both * JOINED_GAIN > predicted["ring"].both:
            continue
        if taken.both < predicted[str(fastest)].both / (GAIN if fastest == "ring" else MARGIN):
            fastest = strategy
    return Choice(fastest, _why(load, fastest, predicted), predicted)


def candidates(load: Load, machine: Machine) -> Iterator[Strategy]:
    """Yield the strategies that "auto" compares and that can run the call, "ring" first."""
    if load.needed is not None:
        yield from ("ring", "direct")
        return
    all_of_them: tuple[Strategy, ...] = ("ring", "direct", "two_way", "gather", "ulysses")
    if without_peers(load, machine) is None:
        all_of_them += ("push", "pull")
    if load.hosts > 1 and load.host_ranks > 1:
        all_of_them += (Ulysses(ranks=load.host_ranks), TwoLevel(ranks=load.host_ranks))
    for strategy in all_of_them:
        refused = objection(strategy, load.plan.ranks, load.heads) is not None
        if not refused and not (load.extents and name_of(strategy) in JOINED):
            yield strategy


def without_peers(load: Load, machine: Machine) -> str | None:
    """Return why "auto" leaves out "pull" and "push", or None if they are candidates."""
    if load.hosts > 1:
        return f"they copy between the GPUs of one host, and these are {load.hosts} hosts"
    if not machine.peer:
        return f"copies between GPUs were not measured on {machine.name}; ring-attn doctor --measure does it on one host"
    if not load.peer_access:
        return "the ranks cannot copy from and to the memory of each other's GPUs in this call"
    return None


def _unpredictable(load: Load, machine: Machine | None, backend: str, device: str) -> str | None:
    """Return why the cost model cannot predict the call's times on ``machine``, as words for a message; None if it can."""
    if machine is None or not load.host_ranks:
        return "the machine was not measured, or it is not known which ranks share a host"
    if machine.noise > NOISE:
        return (
            f"measurements of {machine.name} differ by {machine.noise:.0%}, too much to predict; run ring-attn doctor --measure "
            "again"
        )
    if backend not in ("auto", "hopper", "triton"):
        return f"the machine was measured with its own kernels, and this is backend={backend!r}"
    if device != "cpu" and load.item > 2:
        return "GPUs were measured in bfloat16 and float16, and these numbers are wider"
    return None


def _why(load: Load, strategy: Strategy, predicted: dict[str, Seconds]) -> str:
    where = "on one host" if load.hosts == 1 else f"across {load.hosts} hosts"
    ms = lambda name: f"{predicted[name].both * 1e3:{'.3g' if predicted[name].both < 1 else ',.0f'}} ms"
    if strategy == "ring":
        joined = f"{GAIN - 1:.0%} faster, or {JOINED_GAIN - 1:.0%} if it joins shards"
        return f"the ring, {ms('ring')} {where}: no strategy that can run this is predicted to be {joined}"
    return f"{strategy}, {ms(str(strategy))} {where} where the ring takes {ms('ring')}: {_gain(load, strategy)}"


def _needed(load: Load) -> str:
    return f"the busiest rank receives or sends {load.needed_share:.0%} of the keys that a ring brings it, in one exchange"


def _gain(load: Load, strategy: Strategy) -> str:
    """Return the reason why a strategy is faster than the ring, for a message."""
    hops, tokens = len(load.plan.hops), load.plan.kv_local
    match name_of(strategy):
        case "direct" if load.needed is not None:
            return _needed(load)
        case "direct" if load.plan.mask.hi is not None:
            return "of each shard only the keys that the window shows travel"
        case "direct":
            return "gradients go straight to their owner, while the next step is computed"
        case "two_way":
            return "no step waits for gradients of the step before it, and at most half of the hops follow one another"
        case "pull" | "push":
            return "copy engines move keys and gradients straight between owners and readers, beside the kernels"
        case "gather":
            return f"shards of {tokens:,} tokens are short: one step and one transfer cost less than {hops + 1} steps"
        case "ulysses":
            return f"shards of {tokens:,} tokens are short, and exchanged heads are fewer bytes than keys that visit every rank"
        case _:
            return f"a shard crosses to each host once, not in all of {hops} hops"
