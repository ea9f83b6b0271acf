"""``ring-attn train`` with ``data.batch_tokens``: a step is a global batch, in either framework, and JAX compiles it once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ring_attn_cli.train import data
from ring_attn_cli.train.config import Config, Data, Evaluation, Optimizer, Passkeys, RingConfig
from ring_attn_cli.train.jax_worker import JaxTrainer, make_mesh
from ring_attn_cli.train.loop import lines, microbatches, train

from .support import corpus
from .test_train_parity import Stopped, on_ranks

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")


LENGTHS = (60, 31, 5, 17, 29, 1, 44, 8, 23, 12, 3, 50)


def config_of(folder: Path, name: str, ranks: int) -> Config:
    corpus.write_texts(folder / "data", LENGTHS)
    model = {"vocab": 256, "dim": 16, "depth": 1, "heads": 2, "kv_heads": 1, "hidden": 24, "param_dtype": "float64"}
    files: dict[str, Any] = {"folder": str(folder / "data"), "pattern": "**/*.txt", "held_out": "**/*.txt"}
    return Config(
        out=str(folder / name),
        steps=4,
        save_every=2,
        model=model,
        data=Data(**files, length=60, batch_size=1, batch_tokens=120),
        optimizer=Optimizer(learning_rate=1e-2, warmup=1),
        ring=RingConfig(ranks=ranks, layout="balanced", chunk=20),
        evaluation=Evaluation(every=4, batches=1, buckets=2),
        passkey=Passkeys(lengths=(), train_every=0),
    )


def steps_of(config: Config) -> list[tuple[float, float]]:
    return [(line["loss"], line["norm"]) for line in lines(Path(config.out, "log.jsonl")) if line["kind"] == "step"]


@pytest.mark.exhaustive
def test_steps_over_global_batches_are_the_same_on_any_ranks_of_either_framework_and_after_a_stop(gloo, tmp_path):
    one, two, ours = (config_of(tmp_path, name, ranks) for name, ranks in (("one", 1), ("two", 2), ("jax", 2)))
    gloo(1, on_ranks, one)
    with pytest.raises(Stopped):
        gloo(2, on_ranks, two, 3)
    gloo(2, on_ranks, two)
    with jax.enable_x64(True):
        trainer = JaxTrainer(ours, make_mesh(ours))
        train(ours, trainer, lambda kind, line: None)
        assert trainer._step._cache_size() == 1  # type: ignore[attr-defined]
    for config in (two, ours):
        np.testing.assert_allclose(steps_of(config), steps_of(one), rtol=1e-9)


def test_a_step_takes_the_microbatches_of_one_global_batch(tmp_path):
    from ring_attn_torch import SequenceShardedDataset

    config = config_of(tmp_path, "run", 2)
    data.check(config)
    found = SequenceShardedDataset(**data.dataset_arguments(config, held_out=False), rank=0)
    batches = iter(found)
    for step in range(1, 4):
        shards = microbatches(config, None, 0, batches)  # type: ignore[arg-type]
        assert len(shards) == config.microbatches == 2
        assert len({int(shard.batch_labels) for shard in shards}) == 1
        assert json.loads(found.state())["batches"] == 2 * step
    assert config.tokens == 120
    assert data.dataset_arguments(config, held_out=True)["batch_tokens"] is None


def test_settings_that_do_not_fit_global_batches_are_refused(tmp_path):
    config = config_of(tmp_path, "run", 2)
    with pytest.raises(ValueError, match=r"data\.batch_tokens = 120 says what a step is, and so does data\.accumulate = 2"):
        replace(config, data=replace(config.data, accumulate=2))
    for changed, said in (
        ({"data": replace(config.data, batch_size=2)}, "got batch_size=2 and replicas=1"),
        ({"ring": replace(config.ring, layout="zigzag")}, 'batch_tokens= needs layout="balanced"'),
        ({"data": replace(config.data, batch_tokens=90)}, "batch_tokens must be a multiple of length=60"),
        ({"data": replace(config.data, length=40)}, "data: .* has a document of 60 tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            data.check(replace(config, **changed))
