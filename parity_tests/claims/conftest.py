"""The fixture ``framework``: a claim of both packages is tested once here, for JAX and for PyTorch."""

from __future__ import annotations

import importlib

import pytest

from .framework import Framework

NEEDED = {"jax": ("jax", "flax"), "torch": ("torch",)}


@pytest.fixture(params=NEEDED)
def framework(request: pytest.FixtureRequest) -> Framework:
    return _of(request.param, request)


@pytest.fixture
def frameworks(request: pytest.FixtureRequest) -> list[Framework]:
    """Both."""
    return [_of(name, request) for name in NEEDED]


def _of(name: str, request: pytest.FixtureRequest) -> Framework:
    for needed in NEEDED[name]:
        pytest.importorskip(needed)
    module = importlib.import_module(f"parity_tests.{name}.framework")
    return getattr(module, name.title())(lambda: request.getfixturevalue("gloo"))
