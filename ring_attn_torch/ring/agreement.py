"""All ranks run the same problem or all raise the same message, before anything is sent round the ring.

On a problem that a rank has not seen on this group, its verdict (the problem, or what is wrong with it) goes through the
group's store; every rank reads all verdicts and comes to the same conclusion. A problem seen before costs a set look-up, and
its price is that ranks which disagree among problems they have all seen are not found out, unless ``check_every_call`` is on.
The ranks of a group make the same calls in the same order, as for any collective; a call's number is its key.
"""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.mistakes import in_words, is_integer
from ring_attn_core.problem.problem import Problem

from .groups import Group, group_name, group_of, rank_in, ranks_of

GRACE = timedelta(seconds=5)
"""How long a rank that is about to raise anyway waits to hear whether a lower rank has something to say."""

LONGEST_NAP = 0.25
"""Seconds between two looks into the store, once the wait is long."""

_ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "NotImplementedError": NotImplementedError}


class _Unknown(NamedTuple):
    """What stands for a problem where an error came before there was one."""

    device: str


class Call(NamedTuple):
    """A call of another function than ring_attention, and which ``arguments`` of it all ranks must pass alike, by name.

    ``each_time``: its arguments are seldom the same twice, so it is compared at every call and never remembered.
    """

    call: str
    device: str
    arguments: tuple[tuple[str, Any], ...]
    each_time: bool = False

    def fingerprint(self) -> dict[str, Any]:
        """Return what the ranks compare."""
        return {"call": self.call, **dict(self.arguments)}


class _History:
    """What this rank knows of a group. ``era`` tells a group from one of the same name that was destroyed on the same store.

    ``told``: the keys of its verdicts that may still be in the store. ``checks``: how often ``check_every_call`` was entered;
    ``checked``: how many exchanges there were since, None outside of it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.era = _store(group).add(f"ring_attn/era/{rank_in(group)}", 1)
        self.calls = 0
        self.agreed: set[Problem | Call] = set()
        self.told: list[str] = []
        self.checks = 0
        self.checked: int | None = None

    def next_call(self) -> str:
        """What the keys of the next call begin with; those inside ``check_every_call`` are counted by themselves."""
        if self.checked is None:
            self.calls += 1
            return f"ring_attn/{self.era}/{self.calls}"
        self.checked += 1
        return f"ring_attn/{self.era}/check{self.checks}/{self.checked}"


_seen_alone: set[Problem | Call] = set()
"""What this process has run as a ring of one."""

_histories: WeakKeyDictionary[dist.ProcessGroup, _History] = WeakKeyDictionary()


def agree(problem: Problem | Call, group: Group, error: Exception | None = None, again: bool = False) -> None:
    """Return once every rank of ``group`` is known to run ``problem``; else raise the same error on all of them.

    ``error`` is this rank's own objection; ``again``: ask about a problem seen before too, as all ranks then must. Raises the
    objection of the lowest rank that has one, a ValueError that names what the ranks disagree on, or a RuntimeError that names
    the ranks that did not come within the group's timeout.
    """
    each_time = isinstance(problem, Call) and problem.each_time
    if group is None or ranks_of(group) == 1 or _capturing(problem.device):
        if error is not None:
            raise error
        if not each_time:
            _seen_alone.add(problem)
        return
    history = _history(group)
    call = history.next_call()
    if error is None and problem in history.agreed and not again and history.checked is None:
        return
    patience = GRACE if error else timeout(group, problem.device)
    _conclude(_exchange(_verdict(problem, error), call, group, patience, history.told), error)
    if not each_time:
        history.agreed.add(problem)


def agree_on(call: Call, group: Group, check: Callable[[], None]) -> None:
    """Run ``check``, and return once every rank of ``group`` has done so at the same call; else raise as ``agree`` does.

    A call that every rank has made before is not asked about, but for one of ``each_time``. Under torch.compile nobody is asked.
    """
    error = None
    try:
        check()
    except Exception as objection:  # of whatever kind: the others would wait for this rank
        error = objection
    if not torch.compiler.is_compiling():
        agree(call, group, error)
    elif error is not None:
        raise error


def agreed(problem: Problem, group: Group) -> bool:
    """Whether all ranks have run ``problem`` on this group before, or nobody can be asked now (a CUDA graph is captured)."""
    if group is None or ranks_of(group) == 1:
        return problem in _seen_alone or _capturing(problem.device)
    return _capturing(problem.device) or (group in _histories and problem in _histories[group].agreed)


def refuse(error: Exception, group: Group, device: str) -> None:
    """Tell the other ranks about an ``error`` found before there was a problem to speak of, and raise what all of them raise."""
    agree(_Unknown(device), group, error)  # type: ignore[arg-type]


@contextmanager
def check_every_call(group: dist.ProcessGroup | DeviceMesh | None = None) -> Iterator[None]:
    """Compare every call of ``ring_attention`` on the group between its ranks, inside a ``with``: to find out which one differs.

    Otherwise a rank asks the others only about a problem that it has not run before. Then a call that differs between the ranks,
    and that each of them has run before, is computed from what it got: another mask gives wrong numbers, a skipped call shifts
    all later ones, and shards of other sizes hang, or end a gloo process. In here all ranks raise the same ValueError, before
    anything is sent, naming what differs; one that makes fewer calls than the others is found when it leaves. It is for every
    rank of the group at once: RuntimeError after the group's timeout where one does not enter, or does not come.

    It costs an exchange through the group's store for each call: 4 ms (at best 1.1) between 4 gloo ranks on a
    busy CPU of 2 cores, where a barrier takes 3 ms. Outside of it a call pays nothing. Backward passes are not compared.
    """
    ring = group_of(group_name(group))
    if ring is None or ranks_of(ring) == 1:
        yield
        return
    history = _history(ring)
    if history.checked is not None:
        raise ValueError(
            "check_every_call is on already for this group: enter it once, outside of everything that it shall check"
        )
    history.checks, history.checked = history.checks + 1, 0
    try:
        tell("the start of check_every_call", None, ring)
        yield
        tell("the end of check_every_call", None, ring)
    finally:
        history.checked = None


def tell(call: str, what: Any, group: dist.ProcessGroup, patience: timedelta | None = None) -> list[Any]:
    """What every rank of ``group`` tells the others at this ``call``, as JSON carries it; ``patience``: None for the group's.

    Raises what ``agree`` does where a rank has an objection, is at another call or does not come.
    """
    history = _history(group)
    patience = patience or timeout(group, dist.get_backend_config(group).split(":")[0])
    verdict = {"problem": {"call": call}, "told": what}
    verdicts = _exchange(verdict, history.next_call(), group, patience, history.told)
    _conclude(verdicts, None)
    return [verdict["told"] for verdict in verdicts if verdict]


def timeout(group: dist.ProcessGroup, device: str) -> timedelta:
    """The timeout that the group was made with."""
    options = getattr(group._get_backend(torch.device(device)), "options", None)
    return getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)


def _history(group: dist.ProcessGroup) -> _History:
    if group not in _histories:
        _histories[group] = _History(group)
    return _histories[group]


def _store(group: dist.ProcessGroup) -> Any:
    return dist.distributed_c10d._get_process_group_store(group)


def _verdict(problem: Problem | Call, error: Exception | None) -> dict[str, Any]:
    if error is None:
        return {"problem": {"call": "ring_attention"} | problem.fingerprint()}
    return {"error": type(error).__name__, "message": str(error)}


def _exchange(
    verdict: dict[str, Any], call: str, group: dist.ProcessGroup, patience: timedelta, told: list[str]
) -> list[dict[str, Any] | None]:
    """Every rank's verdict, None for a rank that did not give one in time.

    Once all ranks are here, this one deletes what it ``told`` them before: a rank comes to an exchange after it has read all of
    the one before. So the store holds at most two keys of a rank, except after calls to which not everybody came.
    """
    store = _store(group)
    keys = [f"{call}/{rank}" for rank in range(ranks_of(group))]
    mine = keys[rank_in(group)]
    store.set(mine, json.dumps(verdict, default=_plain))
    if _all_there(store, keys, patience):
        with suppress(RuntimeError):  # a store that deletes nothing, as some of other libraries
            for key in told:
                store.delete_key(key)
        told.clear()
    else:
        store.set(mine, json.dumps(verdict | {"gave_up": True}, default=_plain))  # for whoever comes after this
        keys = [key if store.check([key]) else None for key in keys]
    told.append(mine)
    return [json.loads(store.get(key)) if key else None for key in keys]


def _plain(x: Any) -> Any:
    """What JSON does not know: an integer of another library as an int, all else in words, for nothing may fail halfway."""
    return operator.index(x) if is_integer(x) else in_words(x)


def _all_there(store: Any, keys: list[str], patience: timedelta) -> bool:
    """Wait until the store has all keys; False once ``patience`` is over.

    Asks again and again, each time after an eighth of what it has waited, since an interrupt (Ctrl-C) does not reach a thread
    inside ``store.wait``, which also warns of every timeout.
    """
    began = time.monotonic()
    for key in keys:
        while not store.check([key]):
            waited = time.monotonic() - began
            if waited > patience.total_seconds():
                return False
            time.sleep(min(1e-4 + waited / 8, LONGEST_NAP))
    return True


def _conclude(verdicts: list[dict[str, Any] | None], error: Exception | None) -> None:
    for rank, verdict in enumerate(verdicts):
        if verdict and "error" in verdict:
            raise _ERRORS.get(verdict["error"], RuntimeError)(f"rank {rank}: {verdict['message']}") from error
    absent = [rank for rank, verdict in enumerate(verdicts) if verdict is None]
    if absent:
        call = next(verdict["problem"]["call"] for verdict in verdicts if verdict)
        raise RuntimeError(
            f"{call} was reached by {len(verdicts) - len(absent)} of {len(verdicts)} ranks: {_ranks(absent)} did not come to the "
            "same call within the group's timeout. Every rank must make the same calls in the same order"
        )
    gone = [rank for rank, verdict in enumerate(verdicts) if verdict and "gave_up" in verdict]
    if gone:
        raise RuntimeError(f"this rank came too late: {_ranks(gone)} waited for the group's timeout and gave up")
    first: dict[str, Any] = verdicts[0]["problem"]  # type: ignore[index]
    for name, value in first.items():
        others = [rank for rank, verdict in enumerate(verdicts) if verdict["problem"].get(name) != value]  # type: ignore[union-attr]
        if others:
            other = verdicts[others[0]]["problem"][name]  # type: ignore[index]
            if name == "call":
                raise ValueError(
                    f"the ranks of this ring are at different calls: {value} on rank 0, {other} on {_ranks(others)}. Every rank "
                    "must make the same calls in the same order"
                )
            shapes = "; shard with to_layout, which gives every rank equally many tokens" if name.endswith("_shape") else ""
            raise ValueError(
                f"the ranks of this ring disagree on {name}: {value!r} on rank 0, {other!r} on {_ranks(others)}. Pass "
                f"the same on every rank{shapes}"
            )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _capturing(device: str) -> bool:
    return device == "cuda" and torch.cuda.is_current_stream_capturing()
