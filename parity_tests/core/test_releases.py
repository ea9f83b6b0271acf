"""A release of a dependency that the tests never ran with is allowed, with one warning that names it."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from ring_attn_core import releases

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", releases.TRIED)
def test_tried_releases_are_silent_and_others_are_named(package: str):
    tried = releases.TRIED[package]
    assert list(tried) == sorted(tried)
    for major, minor in tried:
        assert releases.describe_untried(package, f"{major}.{minor}.0+cpu") is None
    newest = ".".join(map(str, tried[-1]))
    for other in ("99.0.1", "0.0.1", "main"):
        said = releases.describe_untried(package, other)
        assert said is not None and said.startswith(f"{package} {other} was not tried with ring-attn, whose tests ran with ")
        assert newest in said


@pytest.mark.parametrize("name", ["newest-py313.txt", "oldest-py311.txt", "cpu-py311.txt"])
def test_the_releases_that_ci_pins_are_tried(name: str):
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements" / name).read_text(), re.M))
    assert {package: said for package in releases.TRIED if (said := releases.describe_untried(package, pins[package]))} == {}


def test_a_process_warns_once_and_its_first_rank_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(releases, "version", lambda package: "99.0")
    monkeypatch.setattr(releases, "_looked_at", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        releases.warn_if_untried("torch", first_rank=False)
    with pytest.warns(UserWarning, match=re.escape("torch 99.0 was not tried")):
        releases.warn_if_untried("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        releases.warn_if_untried("torch")
