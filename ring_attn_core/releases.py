"""Tested releases of other packages (TRIED), and the warning about any other release."""

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
"""Releases (major, minor) of each package that pass the tests, in ascending order. Add a release once it passes."""

_looked_at: set[str] = set()


def warn_if_untried(package: str, first_rank: bool = True) -> None:
    """Warn once per process if the installed release of ``package`` is not in TRIED. Do nothing if ``first_rank`` is False."""
    if not first_rank or package in _looked_at:
        return
    _looked_at.add(package)
    try:
        said = describe_untried(package, version(package))
    except PackageNotFoundError:  # a module under that name without metadata
        return
    if said is not None:
        warnings.warn(said, stacklevel=3)


def describe_untried(package: str, installed: str) -> str | None:
    """Return the text of a warning if release ``installed`` of ``package`` is not in TRIED, else None."""
    number = re.match(r"(\d+)\.(\d+)", installed)
    if number is not None and (int(number[1]), int(number[2])) in TRIED[package]:
        return None
    tried = [".".join(map(str, release)) for release in TRIED[package]]
    several = f"{', '.join(tried[:-1])} and {tried[-1]}" if len(tried) > 1 else tried[0]
    return f"{package} {installed} was not tried with ring-attn, whose tests ran with {several}: take one of these if it fails"
