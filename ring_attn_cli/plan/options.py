"""The kinds of answers of ``ring-attn plan``, such as a drawing or a prediction, and the options that each kind takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

KINDS = {
    "prediction": (
        "a prediction (--gpus, --machine) is of --length tokens in one layout",
        "layout mask length model gpus machine heads head_dim host_gpus",
    ),
    "memory": ("--model alone says what fits into memory", "model gpus memory host_memory tokens activations"),
    "documents": ("--documents gives the length and compares all layouts", "documents layout mask ranks"),
    "tree": ("--tree gives the length and compares all layouts", "tree layout ranks"),
    "batches": ("--batches gives the length and has one layout", "batches ranks tokens"),
    "drawing": ("a drawn plan has no sizes of a model (pass --model or --gpus)", "layout mask ranks length save"),
}
"""For each kind of answer, the reason why it takes no other options, and the names of the options that it takes."""

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
MAX_RANKS = 4096
"""Largest number of ranks in a drawn plan; drawing time grows with its square."""
MAX_TOKENS, MAX_SEGMENTS = 2**24, 10_000
"""Largest numbers of tokens, and of documents or tree segments, that ``--documents`` and ``--tree`` accept."""


def check_used(context: typer.Context, kind: str) -> None:
    """Raise ValueError if an option on the command line has no effect on answers of ``kind``, a key of ``KINDS``."""
    reason, used = KINDS[kind]
    passed = [x for x in context.command.params if context.get_parameter_source(x.name or "").name == "COMMANDLINE"]  # type: ignore[union-attr]
    unused = [x.opts[0] for x in passed if x.name not in used.split()]
    if unused:
        raise ValueError(f"{reason}: leave out {', '.join(unused)}")


def check_drawable(ranks: int) -> None:
    if ranks > MAX_RANKS:
        raise ValueError(f"a plan of {ranks} ranks is too large to draw, for it has a line for each: pass at most {MAX_RANKS}")


def check_drawn(option: str, tokens: int, segments: int) -> None:
    if tokens > MAX_TOKENS or segments > MAX_SEGMENTS:
        raise ValueError(
            f"{option} draws at most {MAX_SEGMENTS:,} segments or documents of {MAX_TOKENS:,} tokens in all, got "
            f"{segments:,} of {tokens:,} tokens: pass fewer"
        )


def tokens(text: str) -> int:
    """Return a number of tokens such as ``8192`` or ``10M``; K, M and G stand for 2^10, 2^20 and 2^30."""
    found = re.fullmatch(r"\s*([+-]?\d+)\s*([kKmMgG]?)\s*", text)
    if found is None:
        raise ValueError(f"{text!r} is not a number of tokens such as 8192, 128K or 10M")
    return int(found[1]) * UNITS[found[2].upper()]


def read_words(text: str, option: str) -> list[str]:
    """Return the words, between commas or white space, of the file at the path ``text`` or, without such a file, of ``text``."""
    path = Path(text)
    try:
        is_file = path.is_file()
    except OSError:  # the numbers are longer than the name of a file may be
        is_file = False
    try:
        return (path.read_text("utf-8") if is_file else text).replace(",", " ").split()
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} takes a file of numbers in UTF-8, and {path} is not text: name another") from error
