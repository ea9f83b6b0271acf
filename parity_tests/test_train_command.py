"""``ring-attn train`` on two CPU ranks: its output, its files, and the same losses however it is started."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from typer.testing import CliRunner

from ring_attn_cli.main import app
from ring_attn_cli.train.loop import lines

from .support import corpus, warm
from .support.programs import ROOT, environment, started

for package in ("jax", "flax", "optax", "orbax.checkpoint", "torch", "safetensors", "matplotlib"):
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
folder = "{folder}/texts"
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
VARIABLES = {"JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
MODULE = "-m", "ring_attn_cli"
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"


def here(*command: str) -> str:
    """Run PyTorch's command in this process, so that its ranks are forked from the server."""
    done = CliRunner().invoke(app, command, env=VARIABLES)
    assert done.exit_code == 0, done.output
    return done.output


WAYS = {
    "torch": here,
    "jax": lambda *command: warm.run([*MODULE, *command], "jax", ROOT, environment(VARIABLES | {"XLA_FLAGS": warm.QUICK})),
    "torch, fresh": lambda *command: started([*MODULE, *command], ROOT, VARIABLES),
    "torchrun": lambda *command: started([*TORCHRUN, *MODULE, *command], ROOT, VARIABLES),
}
"""The ways to start the command. The last two are fresh processes, as users', which import for many seconds."""


@pytest.fixture(scope="module")
def train(warm_workers: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """A function that trains in one of ``WAYS``, once, checks what was printed and written, and returns the losses."""
    folder = tmp_path_factory.mktemp("train")
    corpus.write_texts(folder / "texts", (700, 61, 1, 900, 100, 3, 1300))
    (folder / "config.toml").write_text(CONFIG.format(folder=folder))

    @cache
    def train_once(way: str) -> list[float]:
        framework = "jax" if way == "jax" else "torch"
        said = WAYS[way]("train", f"{folder}/config.toml", "--framework", framework, "--out", f"{folder}/{way}")
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
    "ways",
    [("torch", "jax"), *(pytest.param(("torch", way), marks=pytest.mark.exhaustive) for way in ("torch, fresh", "torchrun"))],
    ids=" ".join,
)
def test_it_trains_alike_however_it_is_started(ways: tuple[str, ...], train):
    first, second = map(train, ways)
    assert len(first) == 4
    assert second == pytest.approx(first, rel=1e-5 if "jax" in ways else 0)
