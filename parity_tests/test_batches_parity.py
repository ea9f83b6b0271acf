"""Global batches in microbatches: loss and gradients of both packages are those of one device, one document after the other."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import ring_attn_jax
import ring_attn_torch
from ring_attn_core import plan_batches

from .jax.ring import mesh_of
from .support import corpus
from .support.models import Arrays, assert_near
from .support.spawn import Ranks

PACKAGES = {"jax": ring_attn_jax, "torch": ring_attn_torch}
LENGTHS = (60, 31, 5, 17, 29, 1, 44, 8, 23, 12, 3, 50)
DATA: dict[str, Any] = {"length": 60, "layout": "balanced", "batch_tokens": 180, "last": "pad", "seed": 2, "epochs": None}
SIZES: dict[str, Any] = {"vocab": 128, "dim": 16, "depth": 1, "heads": 2, "kv_heads": 1, "hidden": 24}
SIZES |= {"param_dtype": "float64", "tied": False, "layout": "contiguous"}
CLOSE = 1e-12
PARTS = 3
"""The number of microbatches of a global batch."""
LONG = pytest.mark.exhaustive


@cache
def weights() -> Arrays:
    torch.manual_seed(0)
    return ring_attn_torch.to_numpy(torch_model(None, None))


def torch_model(group: Any, values: Arrays | None) -> Any:
    sizes: dict[str, Any] = SIZES | {"param_dtype": torch.float64}
    model = ring_attn_torch.RingTransformer(**sizes, group=group)
    if values is not None:
        ring_attn_torch.from_numpy(model, values)
    return model


def weigh(ids: Any) -> Any:
    """Return a weight for the label beside each id."""
    return ids % 5 + 0.25


def results(model: Any, value: Any) -> Arrays:
    return {"loss": np.array(value)} | {name: p.grad.numpy() for name, p in model.named_parameters()}


def one_after_the_other(documents: list[list[int]], weighted: bool = False) -> Arrays:
    """Return loss and gradients of whole documents, each alone on one device, divided by the labels, or weights, of all."""
    found = [alone(tuple(document), weighted) for document in documents if len(document) > 1]
    total = total_of(documents, weighted)
    return {name: np.sum([each[name] for each in found], 0) / total for name in found[0]}


@cache
def alone(document: tuple[int, ...], weighted: bool) -> Arrays:
    """Return the summed loss of a document and its gradients on one device."""
    model, ids = torch_model(None, weights()), torch.tensor([document])
    options = {"label_weights": weigh(ids[:, :-1])} if weighted else {}
    value = ring_attn_torch.loss(model(ids[:, :-1]), ids[:, 1:], reduction="sum", **options)
    value.backward()
    return results(model, value.item())


def total_of(documents: list[list[int]], weighted: bool) -> float:
    return sum(float(weigh(np.array(ids[:-1])).sum()) if weighted else len(ids) - 1 for ids in documents)


def on_rank(group: Any, folder: str, values: Arrays, weight: float | None, count: int = 1) -> list[Arrays]:
    """Return the loss and the summed gradients of the first ``count`` global batches, from this rank's shards.
    ``weight``: the sum of the weights of labels, or None without weights."""
    data: Any = iter(ring_attn_torch.SequenceShardedDataset(folder, ranks=group.size(), rank=group.rank(), **DATA))
    model, found = torch_model(group, values), []
    for _ in range(count):
        value = 0.0
        model.zero_grad()
        for shard in islice(data, PARTS):
            logits = model(shard.ids, shard.positions, shard.length, extents=shard.extents, layout=shard.layout)
            options = {} if weight is None else {"label_weights": weigh(shard.ids)}
            part = ring_attn_torch.loss(logits, shard.labels, reduction="sum", group=group, **options)
            part = part / (weight or shard.batch_labels)
            part.backward()
            value += part.item()
        ring_attn_torch.sum_gradients(model, group)
        found.append({name: x.copy() for name, x in results(model, value).items()})
    return found


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

    def run(self, folder: Path, ranks: int, weight: float | None, count: int = 1) -> list[Arrays]:
        data: Any = iter(ring_attn_jax.SequenceShardedDataset(folder, ranks=ranks, rank=None, **DATA))
        results = []
        for _ in range(count):
            found = []
            for shard in islice(data, PARTS):
                label_weights = jnp.ones(shard.ids.shape) if weight is None else weigh(shard.ids)
                layout, total = ring_attn_jax.TracedLayout.of(shard.layout), jnp.asarray(weight or shard.batch_labels, float)
                plain = shard._replace(layout=None, length=layout.length, batch_labels=None)
                found.append(self.step(self.state, plain, layout, label_weights, total))
            gradients = jax.tree.map(lambda *x: sum(x), *(gradient for _, gradient in found))
            names = ring_attn_jax.to_numpy(nnx.merge(self.graph, gradients))
            results.append({"loss": np.array(sum(float(value) for value, _ in found))} | names)
        return results


def write(folder: Path, count: int = 1) -> list[list[list[int]]]:
    """Write the documents, and return those of the first global batches."""
    corpus.write_texts(folder, LENGTHS)
    data: Any = iter(ring_attn_torch.SequenceShardedDataset(folder, ranks=1, rank=None, **DATA))
    batches = []
    for _ in range(count):
        found, counted = [], set()
        for shard in islice(data, PARTS):
            ids, extents = shard.ids[0].tolist(), shard.extents[0].tolist()
            counted.add(int(shard.batch_labels))
            found += [ids[begin:end] for begin, end in sorted({tuple(x) for x in extents}) if begin < end]
        assert counted == {sum(len(document) - 1 for document in found)}
        batches.append(found)
    return batches


@pytest.mark.parametrize(("ranks", "weighted"), [(1, False), (2, True), (3, False)])
def test_torch_gives_a_global_batch_the_loss_and_gradients_of_one_device(gloo: Ranks, ranks, weighted, tmp_path):
    (documents,) = write(tmp_path)
    assert 3 < len(documents) < len(LENGTHS)
    weight = total_of(documents, True) if weighted else None
    for (mine,) in gloo(ranks, on_rank, str(tmp_path), weights(), weight):
        assert_near(mine, one_after_the_other(documents, weighted), CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "weighted"), [pytest.param(1, False, marks=LONG), (2, True), pytest.param(3, False, marks=LONG)]
)
def test_jax_gives_a_global_batch_the_loss_and_gradients_of_one_device_by_one_program(ranks, weighted, tmp_path):
    (documents,) = write(tmp_path)
    weight = total_of(documents, True) if weighted else None
    with jax.enable_x64(True):
        compiled = Compiled(ranks)
        assert_near(compiled.run(tmp_path, ranks, weight)[0], one_after_the_other(documents, weighted), CLOSE)
    assert compiled.traces == 1


@LONG
@pytest.mark.slow
def test_200_drawn_global_batches_have_the_loss_and_gradients_of_one_device_in_both(gloo: Ranks, tmp_path):
    batches = write(tmp_path, 200)
    assert len({str(documents) for documents in batches}) > 190
    of_torch, _, _ = gloo(3, on_rank, str(tmp_path), weights(), None, 200)
    with jax.enable_x64(True):
        compiled = Compiled(2)
        of_jax = compiled.run(tmp_path, 2, None, 200)
    for documents, *both in zip(batches, of_torch, of_jax, strict=True):
        for found in both:
            assert_near(found, one_after_the_other(documents), CLOSE)
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
