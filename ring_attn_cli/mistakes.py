"""How the commands answer a user's mistake: in one line, without a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

HINT = 'ring-attn: {} is not installed: run pip install ".[demo]" in a clone of the repository'


@contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """A user's mistake (ValueError) or a missing package becomes one line on stderr and exit status 2.

    Whoever reads the output may close it early, as ``head`` does: nothing is said then, and the exit status is 1.
    """
    import typer  # main.py says in words where it is missing

    try:
        yield
    except ModuleNotFoundError as missing:
        typer.echo(HINT.format(missing.name), err=True)
        raise typer.Exit(2) from None
    except BrokenPipeError:  # rich exits with 1 by itself from 13.8 on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would flush into the pipe at exit
        raise typer.Exit(1) from None
    except MemoryError:
        typer.echo("ring-attn: there is not enough memory for this: ask for fewer tokens", err=True)
        raise typer.Exit(2) from None
    except (ValueError, OSError) as error:
        typer.echo(f"ring-attn: {error}", err=True)
        raise typer.Exit(2) from None
