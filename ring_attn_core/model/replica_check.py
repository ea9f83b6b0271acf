"""Comparison of the replicas of named values between ranks, devices or processes, for ``check_ranks`` of both packages.

An *entry* is a named value: a weight, a seed or an argument. Each rank, device or process holds a replica of it. The record
``Replica`` describes one replica: its kind, and its value or, for an array, a digest of its bytes. A *table* maps the name of
each entry to the replicas that one process holds.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

from ..runs import Band, Run
from ..validation import in_words

T = TypeVar("T")

MAX_ENTRIES, MAX_CONTENTS, MAX_OWNERS = 8, 4, 8
"""The most named values, contents of a value, and owners of a content that a message lists. The message counts the others."""

LONGEST = 48
"""The most characters of a value that a message quotes."""

PLAIN = "a number, str, bool, None, mask, Run or numpy array"


class Replica(NamedTuple):
    """A description of one replica of a named value.
    ``owner``: its holder, such as ("rank", 2). ``kind``: type, dtype and shape; equal in all replicas. ``part``: the shard's
    name, or "". ``content``: the value or a digest; equal in all replicas with equal ``part``."""

    owner: tuple[str, int]
    kind: str
    content: str
    part: str = ""


Table = Mapping[str, Sequence[Replica]]


def tables_from_json(tables: Iterable[Any]) -> list[Table]:
    """Convert tables that were received as JSON, where each replica is a list, back to tables of ``Replica`` records."""
    replica = lambda owner, *rest: Replica((owner[0], owner[1]), *rest)
    return [{name: [replica(*each) for each in replicas] for name, replicas in table.items()} for table in tables]


class RankDifference(ValueError):
    """An error on only some ranks, which a retry may mend: a file system may show a save to some hosts later than to others."""


PAUSES = 0.5, 1.5, 3.0, 5.0
"""Pauses in seconds between retries while ranks or processes find different weights."""


def load_alike(
    opened: Callable[[], Any], together: Callable[[], Any], describe: Callable[[Any], tuple[Any, Any]], fill: Callable[..., T]
) -> T:
    """Return ``fill(described, folder)`` if all ranks read one save. ``together()``: a context that compares texts. A new save
    may not be visible to all yet, so all retry for 10 seconds."""
    for pause in (*PAUSES, None):
        with ExitStack() as kept:
            try:
                with together() as alike:
                    held = kept.enter_context(opened())
                    described, config = describe(held)
                    alike.append(held.digest(config))
            except RankDifference as error:
                if pause is None:
                    raise ValueError(str(error)) from error
                time.sleep(pause)
                continue
            with together():
                model = fill(described, held)
                held.check_unwritten()
            return model
    raise AssertionError("the last of the pauses is None")


def check_alike(what: str, unit: str, found: Sequence[str]) -> None:
    """Raise RankDifference if the texts in ``found``, one from each rank or process, differ. ``what``: the subject in words."""
    if len(set(found)) > 1:
        others = [f"{unit} {rank} read {text}" for rank, text in enumerate(found) if text != found[0]]
        listed = "; ".join(others[:MAX_OWNERS])
        raise RankDifference(
            f"{what} are not the same on every {unit}: {unit} 0 read {found[0]}; {listed}. Load them when no process writes "
            "there, from one folder that all hosts share or from equal copies of it"
        )


def name_entries(entries: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in entries:
        if name in found:
            raise ValueError(f"two entries are called {name!r}: rename one")
        found[name] = value
    return found


def check_plain(name: str, x: Any, arrays: str) -> None:
    """Raise ValueError if ``x`` is not a plain value, mask, Run or numpy array. ``arrays``: other accepted types, in words."""
    if not isinstance(x, bool | int | float | str | Band | Run | None) and not (_is_numpy(x) and not x.dtype.hasobject):
        raise ValueError(f"{name} must be {arrays} or {PLAIN} to be compared between ranks, got {in_words(x)}")


def plain_replica(owner: tuple[str, int], x: Any) -> Replica:
    """Return the ``Replica`` of a value that passes ``check_plain``. NaNs compare by their bits."""
    kind = type(x).__name__
    if _is_numpy(x):
        return Replica(owner, array_kind(kind, x.dtype, x.shape), array_content(x.tobytes(), x.item() if x.size == 1 else None))
    text = hex(x) if isinstance(x, int) and x.bit_length() > 64 else repr(x)  # Python refuses to write very long ints in decimal
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}... {digest(text.encode())}"
    elif x != x:
        text = f"{text} {digest(struct.pack('<d', x))}"
    return Replica(owner, kind, text)


def array_kind(kind: str, dtype: Any, shape: Iterable[int]) -> str:
    return f"{kind} {dtype} {list(shape)}"


def array_content(data: Any, value: Any = None) -> str:
    """Return the digest of an array's bytes ``data``. If ``value``, the array's only element, is passed, its text comes first."""
    return digest(data) if value is None else f"{str(value)[:LONGEST]} {digest(data)}"


def digest(data: Any) -> str:
    """Return "#" and a 64-bit digest of ``data``, bytes or a buffer, in hexadecimal."""
    return "#" + blake2b(data, digest_size=8).hexdigest()


def table_digest(table: Table) -> str:
    """Return a digest of a table's replicas without owners. If all processes have equal digests, one table stands for all."""
    return digest(repr(sorted({(name, *replica[1:]) for name, replicas in table.items() for replica in replicas})).encode())


def check_replicas(tables: Sequence[Table], unit: str, remedy: str) -> None:
    """Raise ValueError if replicas differ or a table lacks a value, alike for equal ``tables``. ``remedy``: ends the message."""
    wrong, entries = differences(tables, unit), len({name for table in tables for name in table})
    if wrong:
        raise ValueError(
            f"{len(wrong)} of {entries} entries are not the same everywhere: "
            f"{'; '.join(wrong[:MAX_ENTRIES])}{_more(len(wrong) - MAX_ENTRIES, '; ')}. {remedy}"
        )


def differences(tables: Sequence[Table], unit: str) -> list[str]:
    """Return a text for each named value whose replicas differ: its name and each distinct content, or kind, with its owners."""
    names = dict.fromkeys(name for table in tables for name in table)
    found = {name: _difference([table.get(name) for table in tables], unit) for name in names}
    return [name + text for name, text in found.items() if text]


def _difference(by_rank: Sequence[Sequence[Replica] | None], unit: str) -> str:
    """Return the differences of one value's replicas in words, else "". ``by_rank``: None if a table lacks the value."""
    replicas = [replica for each in by_rank for replica in each or ()]
    kinds = _group((replica.kind, replica.owner) for replica in replicas)
    absent = [(unit, i) for i, each in enumerate(by_rank) if each is None]
    if absent:
        kinds["absent"] = absent
    if len(kinds) > 1:
        return f" is {_list_groups(kinds)}"
    for part in dict.fromkeys(replica.part for replica in replicas):
        contents = _group((replica.content, replica.owner) for replica in replicas if replica.part == part)
        if len(contents) > 1:
            return f" ({replicas[0].kind}{f', {part}' if part else ''}) is {_list_groups(contents)}"
    return ""


def _group(pairs: Iterable[tuple[str, tuple[str, int]]]) -> dict[str, list[tuple[str, int]]]:
    groups: dict[str, list[tuple[str, int]]] = {}
    for content, owner in pairs:
        groups.setdefault(content, []).append(owner)
    return groups


def _list_groups(groups: Mapping[str, Sequence[tuple[str, int]]]) -> str:
    texts = [f"{content} on {owners(whose)}" for content, whose in groups.items()]
    return ", ".join(texts[:MAX_CONTENTS]) + _more(len(texts) - MAX_CONTENTS, ", ")


def owners(whose: Sequence[tuple[str, int]]) -> str:
    """Return a list of owners, such as ("rank", 2), in words: "ranks 0, 1, 3"."""
    texts = []
    for unit in dict.fromkeys(unit for unit, _ in whose):
        numbers = [str(number) for each, number in whose if each == unit]
        plural = "" if len(numbers) == 1 else "es" if unit.endswith("s") else "s"
        texts.append(f"{unit}{plural} {', '.join(numbers[:MAX_OWNERS])}{_more(len(numbers) - MAX_OWNERS, ' ')}")
    return " and ".join(texts)


def _more(count: int, before: str) -> str:
    return f"{before}and {count} more" if count > 0 else ""


def _is_numpy(x: Any) -> bool:
    """Return whether ``x`` looks like an array or a scalar of numpy, by its attributes, without importing numpy."""
    return hasattr(x, "tobytes") and hasattr(getattr(x, "dtype", None), "hasobject")
