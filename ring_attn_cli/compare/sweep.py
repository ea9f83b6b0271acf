"""The sweep of a comparison: variants, ring sizes, and one case (attention problem) for each combination of argument values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from ring_attn_core.layouts import check_ranks

from ..processes import check_count
from .cases import Case
from .variants import FRAMEWORKS, Variant, choose

SWEPT = "length", "heads", "head_dim", "dtype", "layout", "backend"
"""Arguments of a case that may take several values; ``ranks`` may too."""


@dataclass(frozen=True)
class Sweep:
    """The checked request of a comparison. ``cases``: one for each combination of values of the arguments in ``SWEPT``.
    ``axis``: the argument with the most values; in a tie "ranks", then the earlier in ``SWEPT``; "" if none has two.
    ``patience``: seconds."""

    variants: tuple[Variant, ...]
    named: tuple[str, ...]
    frameworks: tuple[str, ...]
    ranks: tuple[int, ...]
    cases: tuple[Case, ...]
    axis: str
    repeats: int
    patience: float

    @property
    def rings(self) -> tuple[int, ...]:
        """Return the ring sizes that run: the requested sizes, and 1 for the comparison with one device."""
        return tuple(sorted({1, *self.ranks}))


def make_sweep(names: Sequence[str], ranks: Any, framework: str, repeats: int, patience: float, **arguments: Any) -> Sweep:
    """Check a request and return its sweep. ``arguments``: fields of ``Case``; those in ``SWEPT`` take one value or several."""
    variants = choose(tuple(names))
    known = {field.name for field in fields(Case)}
    for name in arguments:
        if name not in known:
            raise ValueError(
                f"unknown argument {name!r}: choose {', '.join(['ranks', 'framework', 'repeats', 'patience', *known])}"
            )
    several = {"ranks": make_tuple(ranks)} | {name: make_tuple(arguments.pop(name)) for name in SWEPT if name in arguments}
    for name, values in several.items():
        if not values:
            raise ValueError(f"{name} has no value: pass one, or several with commas between them")
    for ring in several["ranks"]:
        check_ranks(ring)
        check_count(ring, "--ranks")
    if repeats < 1:
        raise ValueError(f"--repeats counts runs that are timed, at least 1, got {repeats}")
    if not 0 < patience < math.inf:
        raise ValueError(f"--patience is in seconds, more than 0 and finite, got {patience}")
    frameworks = tuple(part.strip() for part in framework.split(",") if part.strip())
    if not frameworks or not {*frameworks} <= {*FRAMEWORKS} or len({*frameworks}) < len(frameworks):
        raise ValueError(f"unknown framework {framework!r}: choose {', '.join(FRAMEWORKS)}, or both with a comma between them")
    rings = several.pop("ranks")
    cells = [dict(zip(several, values, strict=True)) for values in product(*several.values())]
    cases = tuple(Case(**arguments, **cell) for cell in cells)
    counts = {"ranks": len(rings)} | {name: len(values) for name, values in several.items()}
    axis = max(counts, key=lambda name: counts[name])
    return Sweep(
        tuple(variants), tuple(names), frameworks, tuple(rings), cases, axis if counts[axis] > 1 else "", repeats, patience
    )


def make_tuple(value: Any) -> tuple[Any, ...]:
    several = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    return tuple(dict.fromkeys(several))
