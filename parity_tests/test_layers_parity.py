"""The layers of both packages from the same weights: same logits, loss, gradients and training, over a ring and on one device."""

from __future__ import annotations

import numpy as np
import pytest

from .support.models import assert_near, token_ids, transformer_weights

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("flax")

import optax  # noqa: E402
from flax import nnx  # noqa: E402

from ring_attn_jax.training.weights import to_numpy  # noqa: E402

from .jax.models import loaded, packed_training, run_transformer, sharded, transformer_step  # noqa: E402
from .torch import models as torch_models  # noqa: E402
from .torch.models import training_on_rank, transformer_on_rank  # noqa: E402

RANKS, LAYOUT, STEPS = 4, "zigzag", 3


@pytest.mark.exhaustive
def test_jax_over_a_ring_is_torch_over_a_ring_and_torch_on_one_device(gloo):
    ids, labels = token_ids()
    ring = run_transformer(transformer_weights(), ids, labels, RANKS, LAYOUT)
    for got in gloo(RANKS, transformer_on_rank, transformer_weights(), ids, labels, LAYOUT, {}):
        assert_near(got, ring, 1e-5)
    assert_near(transformer_on_rank(None, transformer_weights(), ids, labels, "contiguous", {}), ring, 1e-5)


@pytest.mark.exhaustive
def test_training_stays_together(gloo):
    ids, labels = token_ids()
    results = gloo(RANKS, training_on_rank, transformer_weights(), ids, labels, LAYOUT, STEPS)
    for other in results[1:]:
        for name, x in other.items():
            np.testing.assert_array_equal(x, results[0][name], err_msg=f"{name} differs between ranks")
    assert_near(train(ids, labels), results[0], 1e-4)
    assert results[0]["losses"][-1] < results[0]["losses"][0]


@pytest.mark.exhaustive
def test_packed_training_in_jax_is_the_one_in_torch(gloo):
    ours, theirs = packed_training(2), torch_models.packed_training(gloo, RANKS)[0]
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-4)
    assert_near(ours, theirs, 1e-4)


def train(ids: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """The JAX twin of ``training_on_rank``."""
    model, step = transformer_step(RANKS, LAYOUT)
    data = sharded(RANKS, LAYOUT, ids=ids, labels=labels)
    parameters = loaded(model, transformer_weights(), RANKS)
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    moments, losses = optimizer.init(parameters), []

    @jax.jit
    def update(gradients, moments, parameters):
        updates, moments = optimizer.update(gradients, moments, parameters)
        return optax.apply_updates(parameters, updates), moments

    for _ in range(STEPS):
        (value, _), gradients = step(parameters, data, None)
        losses.append(float(value))
        parameters, moments = update(gradients, moments, parameters)
    nnx.update(model, parameters)
    return {"losses": np.array(losses), **to_numpy(model)}
