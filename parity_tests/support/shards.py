"""Packed documents, padding and key masks, and their expected shards: plain Python, one token at a time."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
from hypothesis import strategies as st

from .models import Arrays

IGNORE = -100

# Padding before, between and after documents of 1 to 9 tokens; mostly padding; documents only.
DOCUMENTS = np.array(
    [
        [-1, -1, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, -1, -2, 5, 8, 8, 8, -1],
        [-1, -1, -1, -1, 0, 0, 0, -7, -7, -7, -7, -7, -7, -7, -7, -7, -7, -7, -7, -7, -7],
        [0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 4, 5, 6, 6, 6, 6, 7, 7, 9],
    ]
)
LENGTH = DOCUMENTS.shape[1]
IDS = np.random.default_rng(0).integers(1, 30, DOCUMENTS.shape)
LABELS = np.random.default_rng(1).integers(0, 30, DOCUMENTS.shape)
KEY_MASK = np.random.default_rng(2).random(DOCUMENTS.shape) < 0.7
EVERYTHING: dict[str, Any] = {"documents": DOCUMENTS, "key_mask": KEY_MASK, "restart_positions": True}
RANKS = [1, 2, 3, 4, 8]

CHOICES: dict[str, tuple] = {
    "labels": (None, LABELS),
    "documents": (None, DOCUMENTS),
    "key_mask": (None, KEY_MASK),
    "restart_positions": (False, True),
}
OPTIONS: list[dict[str, Any]] = [dict(zip(CHOICES, given, strict=True)) for given in product(*CHOICES.values())]
OPTIONS = [options for options in OPTIONS if options["documents"] is not None or not options["restart_positions"]]
"""Every combination of shard_batch's arguments, except restarted positions without documents."""


def rows(length: int) -> st.SearchStrategy[list[int]]:
    """Return a hypothesis strategy for document ids: a token continues a document, begins one (id + 1 to 3) or is padding."""
    return st.lists(st.integers(-1, 3), min_size=length, max_size=length).map(_row)


def _row(steps: list[int]) -> list[int]:
    ids: list[int] = []
    last = 0
    for step in steps:
        if step >= 0:
            last += step or (bool(ids) and ids[-1] < 0)  # only a new document can follow padding
        ids.append(last if step >= 0 else -1)
    return ids


def is_packed(row: list[int]) -> bool:
    """Return True if these are ids of packed documents: in order, and none interrupted by padding."""
    found = [i for i, document in enumerate(row) if document >= 0]
    return all(row[i] < row[j] or (row[i] == row[j] and j == i + 1) for i, j in pairwise(found))


def extents(documents: np.ndarray) -> np.ndarray:
    result = np.zeros((*documents.shape, 2), np.int32)
    for row, ids in enumerate(documents.tolist()):
        for i, document in enumerate(ids):
            if document >= 0:
                same = [j for j, other in enumerate(ids) if other == document]
                result[row, i] = same[0], same[-1] + 1
    return result


def slots(layout: str, ranks: int, length: int, rank: int) -> list[int]:
    """Return the position of every slot of a rank, from the table at the top of layouts.py."""
    if layout == "zigzag":
        chunk = -(-length // (2 * ranks))
        return [first * chunk + i for first in (rank, 2 * ranks - 1 - rank) for i in range(chunk)]
    local = -(-length // ranks)
    return {"striped": [rank + ranks * i for i in range(local)], "contiguous": [rank * local + i for i in range(local)]}[layout]


def shard(
    ids: np.ndarray,
    layout: str,
    ranks: int,
    rank: int,
    *,
    labels: np.ndarray | None = None,
    documents: np.ndarray | None = None,
    key_mask: np.ndarray | None = None,
    restart_positions: bool = False,
) -> Arrays:
    """Return the expected arrays of shard_batch for a rank, by name; arrays that the shard does not have are left out."""
    batch, length = ids.shape
    where = slots(layout, ranks, length, rank)
    owner = np.zeros_like(ids) if documents is None else documents
    visible = extents(owner)

    def is_padding(row: int, p: int) -> bool:
        return p >= length or owner[row, p] < 0 or (key_mask is not None and not key_mask[row, p])

    def label(row: int, p: int) -> int:
        if is_padding(row, p):
            return IGNORE
        if labels is not None:
            return labels[row, p]
        return IGNORE if is_padding(row, p + 1) or owner[row, p] != owner[row, p + 1] else ids[row, p + 1]

    def position(row: int, p: int) -> int:
        restarts = restart_positions and p < length and owner[row, p] >= 0
        return p - visible[row, p, 0] if restarts else p

    each = lambda value: np.array([[value(row, p) for p in where] for row in range(batch)])
    result = {
        "ids": each(lambda row, p: ids[row, p] if p < length else 0),
        "labels": each(label),
        "positions": each(position).astype(np.int32),
    }
    if documents is not None:
        result["extents"] = each(lambda row, p: visible[row, p] if p < length else np.zeros(2, np.int32))
    if key_mask is not None:
        result["key_mask"] = each(lambda row, p: p < length and bool(key_mask[row, p]))
    return result


def check_shard(got: Any, expected: Arrays, length: int) -> None:
    """Assert that a Shard of either framework holds exactly ``expected``, and attention's arguments in its dtypes."""
    arrays = {name: np.asarray(x) for name, x in got._asdict().items() if name != "length" and x is not None}
    assert arrays.keys() == expected.keys()
    assert got.length == length
    for name, x in arrays.items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)
        assert name in ("ids", "labels") or x.dtype == expected[name].dtype


# For the loss: over 4 contiguous ranks of 16 tokens, the first has 25 labels, the second 2, the third none, the fourth 1.
UNEVEN = np.array([[0] * 9 + [1] * 7 + [2] * 3 + [-1] * 45, [-1] * 3 + [4] * 12 + [-1] * 47 + [5] * 2])
UNEVEN_LABELS = [25, 2, 0, 1]


def uneven() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return token ids for UNEVEN, an embedding and a head: logits are ``embedding[ids] @ head``."""
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 30, UNEVEN.shape)
    return ids, rng.standard_normal((30, 8)).astype(np.float32), rng.standard_normal((8, 30)).astype(np.float32)


def uneven_loss() -> Arrays:
    """Return the loss of ``uneven()`` and its gradients in float64, from the labels of the whole sequences."""
    ids, embedding, head = uneven()
    x, weights = embedding[ids].astype(np.float64), head.astype(np.float64)
    labels = shard(ids, "contiguous", 1, 0, documents=UNEVEN)["labels"]
    kept = labels != IGNORE
    p = np.exp(x @ weights)
    p /= p.sum(-1, keepdims=True)
    right = np.eye(30)[np.where(kept, labels, 0)]
    dlogits = (p - right) * kept[..., None] / kept.sum()
    dembedding = np.zeros(embedding.shape)
    np.add.at(dembedding, ids, dlogits @ weights.T)
    value = -np.log((p * right).sum(-1))[kept].mean()
    return {"loss": np.asarray(value), "embedding": dembedding, "head": np.einsum("bsd,bsv->dv", x, dlogits)}


# Logits of 4 tokens over 3 words. Each label is the second word, which is impossible for the third token.
IMPOSSIBLE = np.zeros((1, 4, 3), np.float32)
IMPOSSIBLE[0, 2, 1] = -np.inf
IMPOSSIBLE_GRADIENT = np.array([[[4, -8, 4], [4, -8, 4], [6, -12, 6], [4, -8, 4]]]) / 48
