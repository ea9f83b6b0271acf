"""Error reporting of the commands: the message on stderr, and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .processes import Failure

HINT = 'ring-attn: {} is not installed: run pip install "ring-attn[{}]"'
EXTRAS = {"pyarrow": "data", "tokenizers": "data", "jinja2": "data", "transformers": "transformers"}
"""Packages that the extra ``demo`` does not install, and for each the extra that does."""


def missing_in_words(package: str | None) -> str:
    """Return a message that ``package`` is missing, with the pip command for the extra of ring-attn that installs it."""
    return HINT.format(package, EXTRAS.get(package or "", "demo"))


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Print an expected error on stderr without a traceback, and exit: with status 2, or 1 for a :class:`processes.Failure`.
    If the reader of the output closes the pipe early, as ``head`` does, print nothing and exit with status 1."""
    import typer  # main.py reports a missing typer

    try:
        yield
    except ModuleNotFoundError as missing:
        typer.echo(missing_in_words(missing.name), err=True)
        raise typer.Exit(2) from None
    except BrokenPipeError:  # rich exits with status 1 itself from 13.8 on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python flushes into the pipe at exit
        raise typer.Exit(1) from None
    except MemoryError:
        typer.echo("ring-attn: there is not enough memory for this: ask for fewer tokens", err=True)
        raise typer.Exit(2) from None
    except Failure as failure:
        typer.echo(f"ring-attn: {failure}", err=True)
        raise typer.Exit(1) from None
    except (ValueError, OSError) as error:
        typer.echo(f"ring-attn: {error}", err=True)
        raise typer.Exit(2) from None
