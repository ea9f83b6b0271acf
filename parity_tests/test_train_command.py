"""``ring-attn train`` as people start it, on two CPU ranks: its output, its files, and the same losses however it is started."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ring_attn_cli.train.loop import lines

from .support import corpus
from .support.programs import started

for package in ("jax", "flax", "optax", "orbax.checkpoint", "torch", "safetensors", "rich", "matplotlib"):
    pytest.importorskip(package)

CONFIG = """
steps = 4
save_every = 2
[model]
dim = 16
depth = 1
heads = 2
kv_heads = 1
hidden = 24
[data]
folder = "texts"
pattern = "**/*.txt"
held_out = "**/*.txt"
length = 64
[ring]
ranks = 2
[evaluation]
every = 4
batches = 1
[passkey]
lengths = [128]
texts = 1
"""
TRAIN = "-m", "ring_attn_cli", "train", "config.toml"
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
WAYS = {
    "torch": (*TRAIN, "--framework", "torch"),
    "torchrun": (*TORCHRUN, *TRAIN, "--framework", "torch"),
    "jax": (*TRAIN, "--framework", "jax"),
}


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """A function that trains in one of ``WAYS``, once, checks what was printed and written, and returns the losses."""
    folder, root = tmp_path_factory.mktemp("train"), str(Path(__file__).resolve().parents[1])
    corpus.write_texts(folder / "texts", (700, 61, 1, 900, 100, 3, 1300))
    (folder / "config.toml").write_text(CONFIG)
    packages = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))

    @cache
    def train_once(way: str) -> list[float]:
        said = started([*WAYS[way], "--out", way], folder, {"PYTHONPATH": packages, "JAX_PLATFORMS": "cpu", "COLUMNS": "200"})
        assert "weights on 2 x " in said and "step 1: loss " in said and "step 4: held-out loss " in said, said
        out = folder / way
        assert (out / "weights" / "model.safetensors").exists() and (out / "train.png").read_bytes().startswith(b"\x89PNG")
        assert len([*(out / "checkpoints").glob("step*")]) == 2
        log = lines(out / "log.jsonl")
        assert [line["step"] for line in log if line["kind"] == "evaluation"] == [4]
        return [line["loss"] for line in log if line["kind"] == "step"]

    return train_once


@pytest.mark.slow
@pytest.mark.parametrize(
    "ways", [("torch", "jax"), pytest.param(("torch", "torchrun"), marks=pytest.mark.exhaustive)], ids=" ".join
)
def test_it_trains_alike_however_it_is_started(ways: tuple[str, ...], train):
    first, second = map(train, ways)
    assert len(first) == 4
    assert second == pytest.approx(first, rel=1e-5 if "jax" in ways else 0)
