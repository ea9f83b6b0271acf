"""``ring-attn compare``: variants of attention in JAX and PyTorch on the same inputs, beside float64, on one device and a ring.

``variants.py`` says what there is, ``oracles.py`` what is right, ``torch_side.py`` and ``jax_side.py`` compute in processes of
their own, ``measure.py`` and ``diagnosis.py`` say how far a result is off and what is likely wrong with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comparison import Comparison


def run(
    *variants: str,
    ranks: Any = 2,
    framework: str = "jax,torch",
    repeats: int = 5,
    patience: float = 300.0,
    json: str | Path | None = None,
    png: str | Path | None = None,
    **arguments: Any,
) -> Comparison:
    """Compare ``variants`` and return what was found: ``.passed``, ``.results`` with quantities, diagnosis, seconds, bytes.

    ``ranks``: members of the ring, one number or several; one device is always there too. ``arguments``: the fields of
    :class:`cases.Case`, which are the options of the command; ``length``, ``heads``, ``head_dim``, ``dtype``, ``layout`` and
    ``backend`` take one value or several. ``json``, ``png``: files to write. A script that calls this does so under
    ``if __name__ == "__main__":``, for processes are started anew.

    Raises ValueError for what cannot be compared, and :class:`ring_attn_cli.processes.Failure` where a process dies or has not
    answered for ``patience`` seconds.
    """
    from .comparison import compare
    from .sweep import asked

    sweep = asked(variants, ranks, framework, repeats, patience, **arguments)
    check_files(json, png)
    return written(compare(sweep), json, png)


def check_files(json: str | Path | None, png: str | Path | None) -> None:
    """ValueError for files that cannot be written, before anything is computed for them."""
    from . import picture

    if png is not None:
        picture.check(Path(png))
    for path in [Path(x) for x in (json, png) if x is not None]:
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} for {path.name}: make it first")
        if path.is_dir():
            raise ValueError(f"{path} is a folder: name a file in it")
        there = path.exists()
        try:
            path.open("a").close()
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror}): name another file") from error
        if not there:
            path.resolve().unlink()


def written(comparison: Comparison, json: str | Path | None, png: str | Path | None) -> Comparison:
    """``comparison``, once its files are written."""
    from json import dumps

    from . import export, picture

    if json is not None:
        Path(json).write_text(dumps(export.document(comparison), indent=1) + "\n")
    if png is not None:
        picture.save(comparison, Path(png))
    return comparison
