"""Agreement of ranks on a call: before a new call sends a tensor, either all ranks proceed or all raise the same error.

A problem describes a call: its shapes, dtypes and options. At the first call of a problem each rank writes its verdict to the
group's key-value store, and reads the verdicts of all ranks. A verdict is the problem, or the error that the rank raises. At a
later call a rank finds the problem in its own record, and exchanges nothing. So ranks that repeat different earlier problems go
undetected, except in ``check_every_call``. As for any collective, all ranks must make the same calls in the same order.
"""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.problem.problem import Problem
from ring_attn_core.records import add_newest
from ring_attn_core.validation import in_words, is_integer

from .groups import Group, capturing, group_name, group_of, rank_in, ranks_of, store_of

GRACE = timedelta(seconds=5)
"""The longest time that a rank with an error waits for the verdicts of the other ranks before it raises."""

LONGEST_NAP = 0.25
"""The longest time between two polls of the store, in seconds."""

_ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "NotImplementedError": NotImplementedError}


class AgreedCall(NamedTuple):
    """A call other than ring_attention, with ``arguments`` that all ranks share. ``each_time``: compare always, never record."""

    call: str
    device: str
    arguments: tuple[tuple[str, Any], ...]
    each_time: bool = False


class History:
    """One rank's record of a process group: the number of calls, the calls agreed on, and the store keys to delete. ``agreed``:
    the ``Decision`` of each problem, None for other calls. ``read``: the newest extents whose values this rank has read. ``era``:
    a number that an earlier, destroyed group of the same name does not have. ``checks``: entries of ``check_every_call``;
    ``checked``: exchanges inside the current one, or None."""

    def __init__(self, group: Group) -> None:
        self.era = 0 if group is None else store_of(group).add(f"ring_attn/era/{rank_in(group)}", 1)
        self.calls = 0
        self.agreed: dict[Problem | AgreedCall, Any] = {}
        self.read: dict[Any, None] = {}
        self.written: list[str] = []
        self.checks = 0
        self.checked: int | None = None

    def next_call(self) -> str:
        """Return the key prefix of the next call. Inside ``check_every_call`` a separate counter numbers the calls."""
        if self.checked is None:
            self.calls += 1
            return f"ring_attn/{self.era}/{self.calls}"
        self.checked += 1
        return f"ring_attn/{self.era}/check{self.checks}/{self.checked}"


ALONE = History(None)
"""The record of calls that exchange nothing: in a ring of one, or during the capture of a CUDA graph."""

_histories: WeakKeyDictionary[dist.ProcessGroup, History] = WeakKeyDictionary()


def agree(call: AgreedCall, group: Group, again: bool = False) -> None:
    """Check by an exchange that all ranks of ``group`` make ``call``, else raise the lowest failing rank's error on all. Compare
    if the call is new, ``each_time``, inside ``check_every_call`` or with ``again``; never during CUDA graph capture. Raise
    RuntimeError, which names them, if ranks do not come within the group's timeout."""
    record = record_of(group, call.device)
    if record is not ALONE:
        if call in record.agreed and not again and record.checked is None:
            record.calls += 1
            return
        exchange({"call": call.call, **dict(call.arguments)}, None, group, timeout(group, call.device))  # type: ignore[arg-type]
    if not call.each_time:
        add_newest(record.agreed, call)  # all ranks add, and so later forget, the same calls


def refuse(error: Exception, group: Group) -> NoReturn:
    """Report ``error`` to the other ranks, which read it in their next exchange, except under torch.compile. Raise the error of
    the lowest failing rank."""
    if torch.compiler.is_compiling() or group is None or group.size() == 1 or capturing("cuda"):
        raise error
    history, verdict = history_of(group), {"error": type(error).__name__, "message": str(error)}
    raise _first_error(_exchange(verdict, history.next_call(), group, GRACE, history.written)) or error from error


class same_error:
    """A context manager that reports an exception of this rank, which the other ranks raise in their next exchange. If several
    ranks fail, all raise the error of the lowest. Under torch.compile nothing is reported."""

    __slots__ = ("ring",)

    def __init__(self, ring: Group | str) -> None:
        self.ring = ring

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, Exception) and not torch.compiler.is_compiling():
            refuse(error, group_of(self.ring) if isinstance(self.ring, str) else self.ring)


def agree_on(call: AgreedCall, group: Group, check: Callable[[], None]) -> None:
    """Run ``check``, then compare ``call`` between the ranks if new; with ``each_time`` or ``check_every_call`` always."""
    with same_error(group):
        check()
    if not torch.compiler.is_compiling():
        agree(call, group)


def was_compared(call: AgreedCall, group: Group) -> bool:
    """Return True if the ranks have agreed on ``call``, or if a CUDA graph is being captured, which permits no check."""
    return capturing(call.device) or call in record_of(group, call.device).agreed


@contextmanager
def check_every_call(group: dist.ProcessGroup | DeviceMesh | None = None) -> Iterator[None]:
    """Check inside the ``with`` that the group's ranks make equal calls of this package's functions, such as ``ring_attention``.

    Use it to find a call that differs between ranks. By default ranks compare a call only if its shapes, dtypes and options are
    new. So ranks that repeat different earlier calls go undetected. Different masks then give wrong results. Different shard
    sizes make gloo hang or end the process. After a skipped call, a rank's later calls meet wrong calls of the other ranks.
    Inside the ``with`` all ranks raise the same ValueError, naming the difference, before any tensor is sent. If a rank skips a
    call, this is detected at the latest when that rank leaves the ``with``.

    Every rank of the group must enter. Raise RuntimeError after the group's timeout if a rank does not enter or reach a call.
    Each call costs one exchange through the group's store: 4 ms (at best 1.1) between 4 gloo ranks on a busy CPU of 2 cores,
    where a barrier takes 3 ms. Calls outside of the ``with`` pay nothing. Backward passes are not compared.
    """
    ring = group_of(group_name(group))
    if ring is None or ranks_of(ring) == 1:
        yield
        return
    history = history_of(ring)
    if history.checked is not None:
        raise ValueError(
            "check_every_call is on already for this group: enter it once, outside of everything that it shall check"
        )
    history.checks, history.checked = history.checks + 1, 0
    try:
        exchange("the start of check_every_call", None, ring)
        yield
        exchange("the end of check_every_call", None, ring)
    finally:
        history.checked = None


def exchange(call: str | dict[str, Any], what: Any, group: dist.ProcessGroup, patience: timedelta | None = None) -> list[Any]:
    """Gather ``what``, a JSON value, from all ranks through the group's store, by rank. Raise errors as ``agree`` does. ``call``:
    the exchange's name, or a dict with it under "call". ``patience``: the longest wait; None: the group's timeout."""
    history = history_of(group)
    patience = patience or timeout(group, dist.get_backend_config(group).split(":")[0])
    verdict = {"problem": {"call": call} if isinstance(call, str) else call, "value": what}
    verdicts = _exchange(verdict, history.next_call(), group, patience, history.written)
    _conclude(verdicts)
    return [verdict.get("value") for verdict in verdicts if verdict]


def device_type(x: Any) -> str:
    """Return the device of a call on ``x``, "cpu" if it is not a tensor, as the call's check will say."""
    return x.device.type if isinstance(x, torch.Tensor) else "cpu"


def timeout(group: dist.ProcessGroup, device: str) -> timedelta:
    options = getattr(group._get_backend(torch.device(device)), "options", None)
    return getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)


def record_of(group: Group, device: str) -> History:
    return ALONE if group is None or group.size() == 1 or capturing(device) else history_of(group)


def history_of(group: dist.ProcessGroup) -> History:
    found = _histories.get(group)
    if found is None:
        found = _histories[group] = History(group)
    return found


def _exchange(
    verdict: dict[str, Any], call: str, group: dist.ProcessGroup, patience: timedelta, written: list[str]
) -> list[dict[str, Any] | None]:
    """Write this rank's verdict to the store. Return each rank's, or None for a rank that did not write in time. Once all have
    written, delete this rank's ``written`` older keys, which each rank has read: the store keeps at most two verdicts per rank.
    """
    store = store_of(group)
    keys = [f"{call}/{rank}" for rank in range(ranks_of(group))]
    mine = keys[rank_in(group)]
    store.set(mine, json.dumps(verdict, default=_plain))
    if _all_there(store, keys, patience):
        with suppress(RuntimeError):  # stores of some other libraries cannot delete keys
            for key in written:
                store.delete_key(key)
        written.clear()
    else:
        store.set(mine, json.dumps(verdict | {"gave_up": True}, default=_plain))  # read by a rank that comes later
        keys = [key if store.check([key]) else None for key in keys]
    written.append(mine)
    return [json.loads(store.get(key)) if key else None for key in keys]


def _plain(x: Any) -> Any:
    """Convert a value for ``json.dumps``: an integer to int, a balanced layout to a digest, any other object to a description."""
    return operator.index(x) if is_integer(x) else str(x) if hasattr(x, "runs") else in_words(x)


def _all_there(store: Any, keys: list[str], patience: timedelta) -> bool:
    """Poll until the store has all ``keys``; False if ``patience`` ends first. ``store.wait`` would block Ctrl-C and warn."""
    began = time.monotonic()
    for key in keys:
        while not store.check([key]):
            waited = time.monotonic() - began
            if waited > patience.total_seconds():
                return False
            time.sleep(min(1e-4 + waited / 8, LONGEST_NAP))
    return True


def _first_error(verdicts: list[dict[str, Any] | None]) -> Exception | None:
    """Return the error of the lowest failing rank, with the rank in its message. Return None if no rank failed."""
    errors = ((rank, verdict) for rank, verdict in enumerate(verdicts) if verdict and "error" in verdict)
    return next((_ERRORS.get(each["error"], RuntimeError)(f"rank {rank}: {each['message']}") for rank, each in errors), None)


def _conclude(verdicts: list[dict[str, Any] | None]) -> None:
    if error := _first_error(verdicts):
        raise error
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
                calls = f"{value} on rank 0, {other} on {_ranks(others)}. Every rank must make the same calls in the same order"
                raise ValueError(f"the ranks of this ring are at different calls: {calls}")
            hint = "; shard with to_layout, which gives every rank equally many tokens" if name.endswith("_shape") else ""
            hint = ", and the same documents: a balanced layout is made of them" if "balanced over" in f"{other}" else hint
            raise ValueError(
                f"the ranks of this ring disagree on {name}: {value!r} on rank 0, {other!r} on {_ranks(others)}. Pass "
                f"the same on every rank{hint}"
            )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
