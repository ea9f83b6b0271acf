"""Mistakes in the arguments of functions are answered in one sentence that says what to do."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from ring_attn_core import Run, causal

Q, MASK = np.ones((1, 8, 2, 4), np.float32), np.ones((1, 8), bool)


@pytest.mark.parametrize("own", [True, False], ids=["the framework's", "numpy's"])
def test_an_array_for_a_mask_is_told_in_a_line_where_it_belongs(framework, own):
    q, mask = framework.array(Q), framework.array(MASK) if own else MASK
    ring = partial(framework.sharded_ring_attention, **framework.ring(1)) if framework.name == "jax" else framework.ring_attention
    for call in (framework.attend_block, ring):
        with pytest.raises(ValueError, match=r"mask must be full\(\).* of shape \[1, 8\]: .*key_mask=.*extents=") as raised:
            call(q, q, q, mask=mask)
        assert f"{type(mask).__name__.removesuffix('Impl')} of shape" in str(raised.value)
        assert not any(said in str(raised.value) for said in ("ArrayImpl", "True", "\n"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q_run": Run(0, 9)}, "q_run has 9 tokens, and the block holds 8"),
        ({"q_run": Run(0, 4, 2)}, "a block needs equal strides"),
        ({"extents": np.zeros((1, 8, 3), np.int32)}, "extents must be"),
        ({"dropout_rate": 0.5}, "needs dropout_seed"),
        ({"mask": "causal"}, "mask must be"),
        ({"backend": "abacus"}, "unknown backend"),
    ],
    ids=["tokens", "strides", "extents", "seed", "mask", "backend"],
)
def test_a_mistake_about_a_block_says_what_to_do(framework, arguments, message):
    q = framework.array(Q)
    with pytest.raises(ValueError, match=message):
        framework.attend_block(q, q, q, **framework.arrays({"mask": causal(), **arguments}))


X, W, Y = np.ones((2, 4, 3), np.float32), np.ones((7, 3), np.float32), np.ones((2, 4), np.int64)
OF_HEADS: list[tuple[dict[str, Any], str]] = [
    ({"head": W.T}, r"head must be \[vocab, 3\] for hidden states \[2, 4, 3\], got \[3, 7\]: pass model.head_weight"),
    ({"head": 3}, "head must be (an array|a torch.Tensor), got 3"),
    ({"labels": Y[:, 1:], "head": W}, r"must be \[2, 4\] for hidden states .* got \[2, 3\]: both are this rank's shard"),
    ({"chunk": 0, "head": W}, "chunk is a number of tokens, an int of at least 1, got 0"),
    ({"ignore_index": None}, "ignore_index must be one integer, got None"),
    ({"ignore_index": 0.5}, "ignore_index must be one integer, got 0.5"),
]
"""Mistakes in what the loss and the log-probabilities take alike."""


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        *((name, *row) for name in ("loss", "token_log_probs") for row in OF_HEADS),
        ("loss", {"head": W[0]}, r"head must be \[vocab, 3\] .*, got \[3\]"),
        ("loss", {"logits": X[0, 0], "labels": np.ones((), int)}, r"logits must be \[batch, tokens, vocab\], got \[3\]"),
        ("loss", {"chunk": None}, "chunk is a number of tokens, an int of at least 1, got None"),
        ("loss", {"reduction": "none"}, 'reduction must be "mean" or "sum", over all labels of all ranks, got \'none\''),
        ("token_log_probs", {"labels": Y.astype(np.float32)}, "labels must have an integer dtype, .* got float32"),
        ("token_log_probs", {"labels": Y > 0, "head": W}, "labels must have an integer dtype, .* got bool"),
        (
            "token_log_probs",
            {"logits": X.astype(np.int32)},
            "logits and hidden states must have one of the dtypes bfloat16, .* got int32",
        ),
        ("token_log_probs", {"temperature": 0}, "temperature must be a finite Python number above 0, got 0"),
        ("token_log_probs", {"temperature": None}, "temperature must be a finite Python number above 0, got None"),
    ],
)
def test_invalid_arguments_of_loss_and_log_probs_are_refused(framework, name, arguments, message):
    given = framework.arrays({"logits": X, "labels": Y} | arguments) | (framework.no_ring if name == "loss" else {})
    with pytest.raises(ValueError, match=message):
        getattr(framework, name)(given.pop("logits"), given.pop("labels"), **given)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.ones((1, 4)), r"values must be \[1, 5, ...\], .*, got \[1, 4\]: pass layout= for this rank's shard"),
        (np.ones((2, 5)), r"values must be \[1, 5, ...\], .*, got \[2, 5\]"),
        (np.ones(5), r"values must be \[1, 5, ...\], .*, got \[5\]"),
        ([1.0], "values must be (an array|a torch.Tensor), whole or this rank's shard, got list"),
    ],
)
def test_values_of_rollouts_that_do_not_fit_are_refused(framework, values, message):
    packed = framework.pack_rollouts([[1, 2, 3], [1, 2, 4]])
    with pytest.raises(ValueError, match=message):
        framework.unpack_rollouts(**framework.arrays({"values": values, "rollouts": packed}))
    with pytest.raises(ValueError, match="rollouts must be the result of pack_rollouts, got list"):
        framework.unpack_rollouts(framework.array(np.ones((1, 5))), [[1]])
