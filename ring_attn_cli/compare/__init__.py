"""``ring-attn compare``: a comparison of attention in JAX and PyTorch with a float64 reference, on one device and on a ring.

All variants get equal inputs. ``variants.py`` lists the variants, and ``oracles.py`` computes the expected results.
``torch_worker.py`` and ``jax_worker.py`` run them in separate processes. ``measure.py`` measures the error of each result, and
``diagnosis.py`` names the likely cause of an error above its bound. ``leaks.py`` looks for tokens that leak.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comparison import Comparison
    from .leaks import Probed


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
    """Compare attention variants with a float64 reference.

    Return a ``Comparison``: ``passed`` is a bool; ``results`` holds the errors, diagnosis, seconds and bytes of each variant.

    ``variants``: names in ``variants.VARIANTS``, "all", or your own functions as ``module:function``. ``ranks``: one ring size or
    several; one device is always compared too. ``framework``: "jax", "torch", or both with a comma. ``repeats``: number of timed
    runs. ``arguments``: any fields of :class:`cases.Case`, which have the names of the command's options; ``length``, ``heads``,
    ``head_dim``, ``dtype``, ``layout`` and ``backend`` take one value or several. ``json``, ``png``: files to write. In a script,
    call this under ``if __name__ == "__main__":``, because each process is spawned and imports the script again.

    Raise ValueError if the comparison is impossible, and :class:`ring_attn_cli.processes.Failure` if a process dies or does not
    answer for ``patience`` seconds.
    """
    from .comparison import compare
    from .sweep import make_sweep

    sweep = make_sweep(variants, ranks, framework, repeats, patience, **arguments)
    check_files(json, png)
    return write(compare(sweep), json, png)


def find_leaks(
    *variants: str, ranks: Any = 2, framework: str = "jax,torch", patience: float = 300.0, **arguments: Any
) -> tuple[Probed, ...]:
    """Change one token at a time, and return what moves although the mask hides that token: see ``leaks.py``.

    The arguments and the errors are those of :func:`run`; variants other than attention on q, k and v raise ValueError too.
    """
    from .leaks import probe
    from .sweep import make_sweep

    return probe(make_sweep(variants, ranks, framework, 1, patience, **arguments))


def check_files(json: str | Path | None, png: str | Path | None) -> None:
    from ..output_files import check_writable
    from . import report

    if png is not None:
        report.check_picture(Path(png))
    for path in (json, png):
        if path is not None:
            check_writable(Path(path))


def write(comparison: Comparison, json: str | Path | None, png: str | Path | None) -> Comparison:
    """Write ``comparison`` to each file whose path is not None, and return ``comparison``."""
    from json import dumps

    from . import export, report

    if json is not None:
        Path(json).write_text(dumps(export.describe(comparison), indent=1) + "\n")
    if png is not None:
        report.save(comparison, Path(png))
    return comparison
