"""Releases of other packages that the tests were run with, and the warning for any other."""

from __future__ import annotations

import re
import warnings
from importlib.metadata import PackageNotFoundError, version

TRIED = {
    "accelerate": ((1, 15),),
    "flax": ((0, 12),),
    "jax": ((0, 10), (0, 11), (0, 12)),
    "torch": ((2, 11), (2, 13), (2, 15)),
    "transformers": ((5, 13), (5, 23), (5, 24)),
    "triton": ((3, 6), (3, 7), (3, 9)),
}
"""By package the releases, major and minor number, in ascending order. Tests pass with each: add one after a run with it."""


_looked_at: set[str] = set()


def warn_if_untried(package: str, first_rank: bool = True) -> None:
    """Warn if the installed release of ``package`` is not in TRIED, at the first call of a process that is ``first_rank``."""
    if not first_rank or package in _looked_at:
        return
    _looked_at.add(package)
    try:
        said = untried(package, version(package))
    except PackageNotFoundError:  # a module under that name without metadata
        return
    if said is not None:
        warnings.warn(said, stacklevel=3)


def untried(package: str, installed: str) -> str | None:
    """Return a sentence that names a release which is not in TRIED, else None."""
    number = re.match(r"(\d+)\.(\d+)", installed)
    if number is not None and (int(number[1]), int(number[2])) in TRIED[package]:
        return None
    tried = [".".join(map(str, release)) for release in TRIED[package]]
    several = f"{', '.join(tried[:-1])} and {tried[-1]}" if len(tried) > 1 else tried[0]
    return f"{package} {installed} was not tried with ring-attn, whose tests ran with {several}: take one of these if it fails"
