"""Global batches in micro-batches: loss and gradients of both packages are those of one device, one document after the other."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ring_attn_core import plan_batches

from .support import corpus
from .support.models import Arrays, assert_near
from .support.spawn import Ranks

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

import ring_attn_jax  # noqa: E402
import ring_attn_torch  # noqa: E402

from .jax.ring import mesh_of  # noqa: E402

PACKAGES = {"jax": ring_attn_jax, "torch": ring_attn_torch}
LENGTHS = (60, 31, 5, 17, 29, 1, 44, 8, 23, 12, 3, 50)
DATA: dict[str, Any] = {"length": 60, "layout": "balanced", "batch_tokens": 180, "last": "pad", "seed": 2, "epochs": None}
SIZES: dict[str, Any] = {"vocab": 128, "dim": 16, "depth": 1, "heads": 2, "kv_heads": 1, "hidden": 24}
SIZES |= {"param_dtype": "float64", "tied": False, "layout": "contiguous"}
CLOSE = 1e-12
LONG = pytest.mark.exhaustive


@cache
def weights() -> Arrays:
    torch.manual_seed(0)
    return ring_attn_torch.to_numpy(torch_model(None, None))


def torch_model(group: Any, values: Arrays | None) -> Any:
    model = ring_attn_torch.RingTransformer(**SIZES | {"param_dtype": torch.float64}, group=group)
    if values is not None:
        ring_attn_torch.from_numpy(model, values)
    return model


def weigh(ids: Any) -> Any:
    """Return a weight for the label beside each id."""
    return ids % 5 + 0.25


def results(model: Any, value: Any) -> Arrays:
    return {"loss": np.array(value)} | {name: p.grad.numpy() for name, p in model.named_parameters()}


def one_after_the_other(documents: list[list[int]], weighted: bool) -> Arrays:
    """Return loss and gradients of whole documents, each alone on one device, with the labels of all as the divisor."""
    model, value = torch_model(None, weights()), 0.0
    rows = [torch.tensor([document]) for document in documents]
    count = sum(float(weigh(ids[:, :-1]).sum()) if weighted else ids.shape[1] - 1 for ids in rows)
    for ids in rows:
        if ids.shape[1] > 1:
            labels, options = ids[:, 1:], {"label_weights": weigh(ids[:, :-1])} if weighted else {}
            part = ring_attn_torch.loss(model(ids[:, :-1]), labels, reduction="sum", **options) / count
            part.backward()
            value += part.item()
    return results(model, value)


def total_of(shard: Any, documents: list[list[int]], weighted: bool) -> Any:
    return sum(float(weigh(np.array(ids[:-1])).sum()) for ids in documents) if weighted else shard.batch_labels


def on_rank(group: Any, folder: str, documents: list[list[int]], values: Arrays, weighted: bool) -> Arrays:
    """Return the loss and the summed gradients of the first global batch, from this rank's shards of its micro-batches."""
    data = ring_attn_torch.SequenceShardedDataset(folder, ranks=group.size(), rank=group.rank(), **DATA)
    model, value = torch_model(group, values), 0.0
    for shard, _ in zip(data, range(3), strict=False):
        logits = model(shard.ids, shard.positions, shard.length, extents=shard.extents, layout=shard.layout)
        options = {"label_weights": weigh(shard.ids)} if weighted else {}
        part = ring_attn_torch.loss(logits, shard.labels, reduction="sum", group=group, **options)
        part = part / total_of(shard, documents, weighted)
        part.backward()
        value += part.item()
    ring_attn_torch.sum_gradients(model, group)
    return results(model, value)


class Compiled:
    """A training step of JAX that counts how often it is traced."""

    def __init__(self, ranks: int) -> None:
        self.traces, mesh = 0, mesh_of(ranks)
        model = ring_attn_jax.RingTransformer(**SIZES, mesh=mesh, rngs=nnx.Rngs(0))
        ring_attn_jax.from_numpy(model, weights())
        self.graph, self.state = nnx.split(model)
        ring: dict[str, Any] = {"axis_name": "seq", "mesh": mesh, "reduction": "sum"}

        def step(state: Any, shard: Any, layout: Any, label_weights: Any, total: Any) -> Any:
            self.traces += 1

            def objective(state: Any) -> Any:
                model = nnx.merge(self.graph, state)
                logits = model(shard.ids, shard.positions, shard.length, extents=shard.extents, layout=layout)
                return ring_attn_jax.loss(logits, shard.labels, label_weights=label_weights, **ring) / total

            return jax.value_and_grad(objective)(state)

        self.step = jax.jit(step)

    def run(self, folder: Path, ranks: int, documents: list[list[int]], weighted: bool) -> Arrays:
        data, found = ring_attn_jax.SequenceShardedDataset(folder, ranks=ranks, rank=None, **DATA), []
        for shard, _ in zip(data, range(3), strict=False):
            label_weights = weigh(shard.ids) if weighted else jnp.ones(shard.ids.shape)
            layout, total = ring_attn_jax.TracedLayout.of(shard.layout), jnp.asarray(total_of(shard, documents, weighted))
            plain = shard._replace(layout=None, length=layout.length, batch_labels=None)
            found.append(self.step(self.state, plain, layout, label_weights, total.astype(float)))
        gradients = jax.tree.map(lambda *x: sum(x), *(gradient for _, gradient in found))
        names = ring_attn_jax.to_numpy(nnx.merge(self.graph, gradients))
        return {"loss": np.array(sum(float(value) for value, _ in found))} | names


def write(folder: Path) -> list[list[int]]:
    """Write the documents, and return those of the first global batch."""
    corpus.write_texts(folder, LENGTHS)
    data = ring_attn_torch.SequenceShardedDataset(folder, ranks=1, rank=None, **DATA)
    found = []
    for shard, _ in zip(data, range(3), strict=False):
        ids, begins = shard.ids[0].tolist(), shard.extents[0].tolist()
        assert int(shard.batch_labels) == int(next(iter(data)).batch_labels)
        found += [ids[begin:end] for begin, end in sorted({tuple(x) for x in begins}) if begin < end]
    assert 3 < len(found) < len(LENGTHS)
    assert int(shard.batch_labels) == sum(len(document) - 1 for document in found)
    return found


@pytest.mark.parametrize(("ranks", "weighted"), [(1, False), (2, True), (3, False)])
def test_torch_gives_a_global_batch_the_loss_and_gradients_of_one_device(gloo: Ranks, ranks, weighted, tmp_path):
    documents = write(tmp_path)
    found = gloo(ranks, on_rank, str(tmp_path), documents, weights(), weighted)
    expected = one_after_the_other(documents, weighted)
    for mine in found:
        assert_near(mine, expected, CLOSE)


@pytest.mark.parametrize(
    ("ranks", "weighted"), [pytest.param(1, False, marks=LONG), (2, True), pytest.param(3, False, marks=LONG)]
)
def test_jax_gives_a_global_batch_the_loss_and_gradients_of_one_device_by_one_program(ranks, weighted, tmp_path):
    documents = write(tmp_path)
    with jax.enable_x64(True):
        compiled = Compiled(ranks)
        assert_near(compiled.run(tmp_path, ranks, documents, weighted), one_after_the_other(documents, weighted), CLOSE)
    assert compiled.traces == 1


@pytest.mark.parametrize("package", PACKAGES)
def test_a_resumed_dataset_goes_on_in_the_middle_of_a_global_batch_to_the_bit(package, tmp_path):
    write(tmp_path)
    (other,) = set(PACKAGES) - {package}
    make = lambda name: PACKAGES[name].SequenceShardedDataset(tmp_path, ranks=2, rank=1, **DATA)
    data, resumed = make(package), make(other)
    everything = [shard for shard, _ in zip(data, range(3 * data.batches), strict=False)]  # into the third epoch
    resumed.resume(make(package).state(data.batches + 1))
    for number, shard in zip(range(data.batches + 1, len(everything)), resumed, strict=False):
        corpus.assert_same(shard, everything[number])
        assert shard.layout == everything[number].layout
        assert int(shard.batch_labels) == int(everything[number].batch_labels)


def test_a_plan_made_by_hand_gives_the_same_shards(tmp_path):
    """shard_batch in a planned layout: what users with data of their own do."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 99, n) for n in LENGTHS]
    for batch in plan_batches(LENGTHS, 3, 30):
        ids, of = np.zeros((2, 90), np.int64) - np.array([[0], [1]])
        held = np.concatenate([documents[document] for document in batch.documents])
        ids[: len(held)], of[: len(held)] = held, np.repeat(batch.documents, batch.lengths)
        shards = []
        for package, array in ((ring_attn_torch, torch.from_numpy), (ring_attn_jax, jnp.asarray)):
            whole = package.shard_batch(array(ids[None]), batch.layout, 3, documents=array(of[None]))
            assert whole.ids.shape == (1, 90) and whole.layout == batch.layout
            assert int((whole.labels != -100).sum()) == sum(n - 1 for n in batch.lengths)
            shards.append(whole)
        corpus.assert_same(*shards)
