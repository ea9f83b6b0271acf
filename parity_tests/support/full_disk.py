"""A full disk: the operating system refuses writes beyond a number of bytes of a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(most: int) -> Iterator[None]:
    """Fail every write beyond the first ``most`` bytes of a file with an OSError, in all threads of this process."""
    import resource  # not on Windows

    assert sys.platform != "win32"
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
