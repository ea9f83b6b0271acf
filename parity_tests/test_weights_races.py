"""Tests of weights that are read while they change: from one save, the same on every rank, and only from regular files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx

import ring_attn_jax
import ring_attn_torch
from ring_attn_core.model import replica_check
from ring_attn_core.model.weight_files import WeightFolder

from .support.models import TRANSFORMER
from .support.spawn import PerRank
from .support.special_files import DEEP, KINDS, in_time, put

pytest.importorskip("safetensors")


PACKAGES = {"jax": ring_attn_jax, "torch": ring_attn_torch}
KINDS_OF_FOLDER = {"own": ("save_weights", "load_weights"), "llama": ("save_llama", "load_llama")}

pytestmark = pytest.mark.parametrize("package", PACKAGES)
of_each_kind = pytest.mark.parametrize("kind", KINDS_OF_FOLDER)


def made(package: str, value: float, eps: float = 1e-6, **changed: Any) -> Any:
    """A model whose every weight is ``value``."""
    sizes: dict[str, Any] = TRANSFORMER | {"eps": eps} | changed
    if package == "torch":
        model: Any = ring_attn_torch.RingTransformer(**sizes)
    else:
        model = ring_attn_jax.RingTransformer(**sizes, rngs=nnx.Rngs(0))
    weights = {name: np.full_like(x, value) for name, x in PACKAGES[package].to_numpy(model).items()}
    return PACKAGES[package].from_numpy(model, weights)


def values(package: str, model: Any) -> set[float]:
    return {float(x) for weight in PACKAGES[package].to_numpy(model).values() for x in np.unique(weight)}


def save(package: str, kind: str, folder: Path, value: float, eps: float = 1e-6) -> None:
    getattr(PACKAGES[package], KINDS_OF_FOLDER[kind][0])(made(package, value, eps), folder)


def load(package: str, kind: str, folder: Path, **ring: Any) -> Any:
    return getattr(PACKAGES[package], KINDS_OF_FOLDER[kind][1])(folder, **ring)


@of_each_kind
def test_a_save_while_another_process_loads_never_mixes_two_saves(package, kind, tmp_path, monkeypatch):
    """The other process saves as soon as config.json has been read."""
    save(package, kind, tmp_path / "w", 1.0, eps=1e-3)
    read, saves = json.loads, iter([2.0, 3.0])

    def then_saved(*arguments: Any, **keywords: Any) -> Any:
        found = read(*arguments, **keywords)
        monkeypatch.setattr(json, "loads", read)
        save(package, kind, tmp_path / "w", next(saves), eps=1e-4)
        return found

    monkeypatch.setattr(json, "loads", then_saved)
    model = load(package, kind, tmp_path / "w")
    assert (model.config.eps, values(package, model)) in ((1e-3, {1.0}), (1e-4, {2.0}))
    assert next(saves) == 3.0


def test_weights_that_are_written_to_while_they_are_loaded_are_named(package, tmp_path, monkeypatch):
    save(package, "own", tmp_path / "w", 1.0)
    digest = WeightFolder.digest

    def then_written(held: WeightFolder, *arguments: Any) -> str:
        os.utime(tmp_path / "w" / "model.safetensors", ns=(1, 1))
        return digest(held, *arguments)

    monkeypatch.setattr(WeightFolder, "digest", then_written)
    with pytest.raises(ValueError, match=r"model\.safetensors was written to while it was read"):
        load(package, "own", tmp_path / "w")


@pytest.mark.pairs
@pytest.mark.parametrize("what", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("special", KINDS)
@of_each_kind
def test_a_special_file_is_named_and_never_waited_for(package, kind, special, what, tmp_path):
    save(package, kind, tmp_path / "w", 1.0)
    if what.endswith("index.json"):
        (tmp_path / "w" / "model.safetensors").unlink()
    put(special, tmp_path / "w" / what)
    with in_time(), pytest.raises(ValueError, match=KINDS[special]) as raised:
        load(package, kind, tmp_path / "w")
    assert str(tmp_path / "w" / what) in str(raised.value)


@pytest.mark.pairs
@pytest.mark.parametrize("what", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("around", ["", '{"vocab": %s}'], ids=["alone", "inside"])
@of_each_kind
def test_json_that_is_nested_too_deeply_is_named(package, kind, around, what, tmp_path):
    save(package, kind, tmp_path / "w", 1.0)
    if what.endswith("index.json"):
        (tmp_path / "w" / "model.safetensors").unlink()
    (tmp_path / "w" / what).write_text(around % DEEP if around else DEEP)
    with pytest.raises(ValueError, match=f"{what} cannot be read as JSON: its arrays and objects are nested too deeply"):
        load(package, kind, tmp_path / "w")


@of_each_kind
def test_a_folder_that_links_to_itself_is_named(package, kind, tmp_path):
    (tmp_path / "w").symlink_to(tmp_path / "w")
    for call in (load, lambda package, kind, folder: save(package, kind, folder, 1.0)):
        with pytest.raises((ValueError, OSError), match=str(tmp_path / "w")):
            call(package, kind, tmp_path / "w")


@pytest.mark.parametrize("folder", [None, 3, "", b"", "/", "a\0b"], ids=repr)
def test_an_invalid_path_of_a_folder_is_refused(package, folder):
    for call in (load, lambda package, kind, folder: save(package, kind, folder, 1.0)):
        with pytest.raises(ValueError, match=r"folder must be the path of a folder of weights|/ is the root of the file system"):
            call(package, "own", folder)


class TestTorchOnRings:
    """Tests of several processes that share a folder, or do not."""

    def test_ranks_that_read_other_weights_are_told(self, package, gloo, tmp_path):
        for folder, value in (("a", 1.0), ("b", 2.0)):
            save(package, "own", tmp_path / folder, value)
        for outcome in gloo.outcomes(3, loaded_at_once, package, PerRank(*(tmp_path / name for name in "aba"))):
            assert type(outcome) is ValueError
            assert "what ranks have read while loading weights are not the same on every rank: rank 0 read" in str(outcome)
            assert str(outcome).count("; rank 1 read") == 1
        assert gloo(3, loaded_at_once, package, tmp_path / "a") == [{1.0}] * 3

    def test_a_rank_that_sees_the_folder_late_waits_for_it(self, package, gloo, tmp_path):
        save(package, "own", tmp_path / "a", 1.0)
        assert gloo(2, loaded_late, package, tmp_path / "a") == [{1.0}] * 2

    @pytest.fixture(autouse=True)
    def _only_torch(self, package):
        if package != "torch":
            pytest.skip("JAX's processes take minutes to start: jax/test_ranks.py compares them")


def loaded_at_once(group: Any, package: str, folder: Path) -> set[float]:
    replica_check.PAUSES = ()
    return values(package, load(package, "own", folder, group=group))


def loaded_late(group: Any, package: str, folder: Path) -> set[float]:
    """As on another host, whose list of names is a second old."""
    replica_check.PAUSES = 0.5, 1.0
    until, is_dir = time.monotonic() + 1.0 * torch.distributed.get_rank(group), Path.is_dir
    Path.is_dir = lambda path, *rest, **more: time.monotonic() > until and is_dir(path, *rest, **more)  # type: ignore[method-assign]
    try:
        return values(package, load(package, "own", folder, group=group))
    finally:
        Path.is_dir = is_dir  # type: ignore[method-assign]
