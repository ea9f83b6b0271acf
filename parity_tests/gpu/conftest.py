"""The fixtures and options of the GPU tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ring_attn_core.kernels import steps
from ring_attn_core.kernels.hopper import launches as hopper


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """programs(3): no more than 3 programs of the Hopper forward share the tiles, so that each takes many, as at real sizes."""

    def limit(count: int) -> None:
        monkeypatch.setattr(hopper, "PROGRAMS", count)
        steps.forward.cache_clear()

    yield limit
    monkeypatch.undo()
    steps.forward.cache_clear()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """passes(2): the Hopper backward takes two passes, whatever the table of tile_sizes says."""
    cached = steps.in_one_pass, steps.extent_bounds, steps.lists

    def force(count: int) -> None:
        monkeypatch.setattr(steps, "hopper_passes", lambda *_: count)
        for made in cached:
            made.cache_clear()

    yield force
    monkeypatch.undo()
    for made in cached:
        made.cache_clear()
