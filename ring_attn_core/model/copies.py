"""What ranks, devices or processes hold of the same thing, compared by name: what ``check_ranks`` of both packages shares.

An *entry* is a weight, a seed, an argument: something with a name. Whoever has it holds a *copy*, and tells of it what fits into
a message: of an array its kind and a digest of its bytes, of a number or a text the value itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from ..mistakes import in_words
from ..runs import Band, Run

MOST_ENTRIES, MOST_CONTENTS, MOST_HOLDERS = 8, 4, 8
"""How many entries that differ a message names, with how many contents of each, held by how many; it counts the rest."""

LONGEST = 48
"""Characters of a value that stands in a message as it is."""

PLAIN = "a number, str, bool, None, mask, Run or numpy array"


class Copy(NamedTuple):
    """What one ``holder``, such as ("rank", 2), has of an entry.

    ``kind``: type, dtype and shape in words, the same in all copies. ``part``: which shard of an array that is cut on purpose, ""
    where the copy is whole. ``content``: a value or a digest, the same in all copies of one part.
    """

    holder: tuple[str, int]
    kind: str
    content: str
    part: str = ""


Table = Mapping[str, Sequence[Copy]]
"""What one process knows: its copies of every entry, by the entry's name."""


def as_told(tables: Iterable[Any]) -> list[Table]:
    """The tables that JSON has carried."""
    copy = lambda holder, *rest: Copy((holder[0], holder[1]), *rest)
    return [{name: [copy(*each) for each in copies] for name, copies in table.items()} for table in tables]


class Unlike(ValueError):
    """What only some ranks could do, or found otherwise than the others: it may pass where a file system is late."""


def check_alike(what: str, holder: str, found: Sequence[str]) -> None:
    """Raise Unlike if the texts that ranks found of ``what``, one a rank, are not all the same; ``holder``: such as "rank"."""
    if len(set(found)) > 1:
        others = [f"{holder} {rank} read {text}" for rank, text in enumerate(found) if text != found[0]]
        listed = "; ".join(others[:MOST_HOLDERS])
        raise Unlike(
            f"{what} are not the same on every {holder}: {holder} 0 read {found[0]}; {listed}. Load them when nobody saves "
            "there, from one folder that all hosts share or from equal copies of it"
        )


def named(entries: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The entries by name; ValueError where two have the same."""
    found: dict[str, Any] = {}
    for name, value in entries:
        if name in found:
            raise ValueError(f"two entries are called {name!r}: rename one, so that a message can tell them apart")
        found[name] = value
    return found


def check_plain(name: str, x: Any, arrays: str) -> None:
    """ValueError for what is neither a number, a text, None, a band, a run nor numpy's; ``arrays``: what else is taken."""
    if not isinstance(x, bool | int | float | str | Band | Run | None) and not (_is_numpy(x) and not x.dtype.hasobject):
        raise ValueError(f"{name} must be {arrays} or {PLAIN} to be compared between ranks, got {in_words(x)}")


def plain_copy(holder: tuple[str, int], x: Any) -> Copy:
    """The copy of what ``check_plain`` lets pass. Floats are compared by their bits, NaN too."""
    kind = type(x).__name__
    if _is_numpy(x):
        return Copy(holder, array_kind(kind, x.dtype, x.shape), array_content(x.tobytes(), x.item() if x.size == 1 else None))
    text = hex(x) if isinstance(x, int) and x.bit_length() > 64 else repr(x)  # Python writes no decimals of very long ints
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}... {digest(text.encode())}"
    elif x != x:
        text = f"{text} {digest(struct.pack('<d', x))}"
    return Copy(holder, kind, text)


def array_kind(kind: str, dtype: Any, shape: Iterable[int]) -> str:
    return f"{kind} {dtype} {list(shape)}"


def array_content(data: Any, value: Any = None) -> str:
    """The digest of an array's bytes; before it the ``value``, where it is one number."""
    return digest(data) if value is None else f"{str(value)[:LONGEST]} {digest(data)}"


def digest(data: Any) -> str:
    """64 bits that tell bytes, or what gives them (a buffer), from others."""
    return "#" + blake2b(data, digest_size=8).hexdigest()


def essence(table: Table) -> str:
    """A digest of the entries without their holders: of tables that have it in common, one says whether any copies differ."""
    return digest(repr(sorted({(name, *copy[1:]) for name, copies in table.items() for copy in copies})).encode())


def check_copies(tables: Sequence[Table], unit: str, remedy: str) -> None:
    """ValueError that names every entry of which the copies differ, or that a table lacks, and who holds what.

    ``tables``: of every ``unit``, "rank" or "process", in their order. The message is the same wherever the tables are.
    """
    wrong, entries = differences(tables, unit), len({name for table in tables for name in table})
    if wrong:
        raise ValueError(
            f"{len(wrong)} of {entries} entries are not the same everywhere: "
            f"{'; '.join(wrong[:MOST_ENTRIES])}{_more(len(wrong) - MOST_ENTRIES, '; ')}. {remedy}"
        )


def differences(tables: Sequence[Table], unit: str) -> list[str]:
    """In words, each entry that is not the same everywhere and who holds what; in the order of the first table's names."""
    names = dict.fromkeys(name for table in tables for name in table)
    told = {name: _difference([table.get(name) for table in tables], unit) for name in names}
    return [name + text for name, text in told.items() if text]


def _difference(told: Sequence[Sequence[Copy] | None], unit: str) -> str:
    """What differs between the copies of an entry, in words that follow its name; "" if nothing does."""
    copies = [copy for each in told for copy in each or ()]
    kinds = _grouped((copy.kind, copy.holder) for copy in copies)
    absent = [(unit, i) for i, each in enumerate(told) if each is None]
    if absent:
        kinds["absent"] = absent
    if len(kinds) > 1:
        return f" is {_listed(kinds)}"
    for part in dict.fromkeys(copy.part for copy in copies):
        contents = _grouped((copy.content, copy.holder) for copy in copies if copy.part == part)
        if len(contents) > 1:
            return f" ({copies[0].kind}{f', {part}' if part else ''}) is {_listed(contents)}"
    return ""


def _grouped(pairs: Iterable[tuple[str, tuple[str, int]]]) -> dict[str, list[tuple[str, int]]]:
    """The holders of each content."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for content, holder in pairs:
        groups.setdefault(content, []).append(holder)
    return groups


def _listed(groups: Mapping[str, Sequence[tuple[str, int]]]) -> str:
    texts = [f"{content} on {holders(whose)}" for content, whose in groups.items()]
    return ", ".join(texts[:MOST_CONTENTS]) + _more(len(texts) - MOST_CONTENTS, ", ")


def holders(whose: Sequence[tuple[str, int]]) -> str:
    """Such as "ranks 0, 1, 3"."""
    texts = []
    for unit in dict.fromkeys(unit for unit, _ in whose):
        numbers = [str(number) for each, number in whose if each == unit]
        plural = "" if len(numbers) == 1 else "es" if unit.endswith("s") else "s"
        texts.append(f"{unit}{plural} {', '.join(numbers[:MOST_HOLDERS])}{_more(len(numbers) - MOST_HOLDERS, ' ')}")
    return " and ".join(texts)


def _more(count: int, before: str) -> str:
    return f"{before}and {count} more" if count > 0 else ""


def _is_numpy(x: Any) -> bool:
    """Whether it is an array or a scalar of numpy, which the core does not import."""
    return hasattr(x, "tobytes") and hasattr(getattr(x, "dtype", None), "hasobject")
