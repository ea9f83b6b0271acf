"""The common inputs of all ways of training: a model with every feature of the layers, initial weights, and batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ring_attn_cli.train.arithmetic import first_weights
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.rotary import Llama3, Rotary, YaRN

Arrays = dict[str, np.ndarray]

LENGTH, ROWS, VOCAB = 61, 4, 32
CLIP = 1.0
"""The global norm at which gradients are clipped."""
CHUNK = 24
"""Number of tokens whose logits are in memory at a time, if the loss takes hidden states."""
LEARNING_RATE = {"sgd": 0.1, "adamw": 3e-3}
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of one run. ``optimizer``: "sgd" or "adamw".

    ``moved``: 0, or the seed of a draw that moves each initial weight one ulp up or down.
    """

    dtype: str
    optimizer: str
    steps: int = 200
    moved: int = 0

    @property
    def config(self) -> TransformerConfig:
        """Return the config of a model with every feature; SGD's has a tied head."""
        return TransformerConfig(
            vocab=VOCAB,
            dim=16,
            depth=2,
            heads=4,
            kv_heads=2,
            head_dim=8,
            hidden=24,
            windows=(20, None),
            rotaries=(Rotary(100.0, YaRN(4.0, 32)), Rotary(500.0, Llama3(4.0, 1.0, 4.0, 32))),
            qk_norm=True,
            qkv_bias=True,
            eps=1e-5,
            softcap=5.0,
            sinks=True,
            alibi=True,
            dropout_rate=0.1,
            tied=self.optimizer == "sgd",
            param_dtype=self.dtype,
            mlp_chunk=7,
        )

    def weights(self, like: Arrays) -> Arrays:
        """Draw initial weights with the names and shapes of ``like``; biases and sinks are nonzero, so that they matter."""
        rng = np.random.default_rng(1)
        drawn = first_weights({name: x.astype(np.float64) for name, x in sorted(like.items())}, seed=0)
        drawn = {name: (x + 0.1 * rng.standard_normal(x.shape)).astype(self.dtype) for name, x in drawn.items()}
        if self.moved:
            signs = np.random.default_rng([3, self.moved])
            ends = {name: np.where(signs.random(x.shape) < 0.5, -np.inf, np.inf) for name, x in drawn.items()}
            drawn = {name: np.nextafter(x, ends[name].astype(x.dtype)) for name, x in drawn.items()}
        return drawn


def batch(step: int) -> Arrays:
    """Draw the arguments of ``shard_batch``, [ROWS, LENGTH] in natural order: each token is the one before plus 1 to 3.

    Each row has its own documents, and the last row ends in padding. Some keys are masked, in one document all of them.
    """
    rng = np.random.default_rng([2, step])
    ids = (rng.integers(1, 4, (ROWS, LENGTH)).cumsum(1) % VOCAB).astype(np.int32)
    documents = np.sort(rng.integers(0, 4, (ROWS, LENGTH)), 1).astype(np.int32)
    documents[-1, LENGTH // 3 :] = -1
    key_mask = rng.random((ROWS, LENGTH)) < 0.95
    key_mask[0, documents[0] == 0] = False
    return {"ids": ids, "documents": documents, "key_mask": key_mask}


def apart(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference of two runs at the same step."""
    a, b = np.array(ours, np.float64), np.array(theirs, np.float64)
    return float(np.max(np.abs(a - b) / np.abs(b)))
