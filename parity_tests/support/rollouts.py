"""Rollouts that share prefixes, drawn by a seed, and what their trees hold, found token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ring_attn_core.data.rollouts import Rollouts, pack_rollouts

Path = tuple[int, ...]

VOCAB = 11


def drawn_tree(rng: np.random.Generator, segments: int) -> tuple[list[int], list[int]]:
    """Return the parents and lengths of ``segments`` segments in depth-first order; a row may hold several trees."""
    parents, path = [-1], [0]
    for segment in range(1, segments):
        path = path[: rng.integers(0, len(path) + 1)]
        parents.append(path[-1] if path else -1)
        path = [*path, segment]
    return parents, rng.integers(1, 6, segments).tolist()


def ancestors(parents: Path | list[int], lengths: Path | list[int]) -> list[list[int]]:
    """Return for each token of a row the tokens on its path from the root, itself the last."""
    paths: list[list[int]] = []
    ends: list[list[int]] = []
    for parent, length in zip(parents, lengths, strict=True):
        path = ends[parent] if parent >= 0 else []
        for _ in range(length):
            path = [*path, len(paths)]
            paths.append(path)
        ends.append(path)
    return paths


def drawn_rollouts(rng: np.random.Generator, count: int, longest: int, vocab: int) -> dict[str, Any]:
    """Return rollouts, loss masks, and weights of any sign that a float32 sums exactly, as pack_rollouts takes them."""
    rollouts: list[list[int]] = []
    for _ in range(count):
        start = rollouts[rng.integers(len(rollouts))] if rollouts else []
        own = rng.integers(0, vocab, rng.integers(0 if start else 1, longest + 1)).tolist()
        shared = start[: rng.integers(0, len(start) + 1)]
        rollouts.append([*shared, *own][:longest] or start)
    weights = [rng.integers(-16, 17, len(x)) / 8 if rng.random() < 0.5 else rng.integers(-16, 17) / 8 for x in rollouts]
    return {"rollouts": rollouts, "loss_masks": [rng.random(len(x)) < 0.8 for x in rollouts], "weights": weights}


def loss_alone(drawn: dict[str, Any], log_probs_of: Callable[[list[int]], Any]) -> Any:
    """Return the weighted sum of the cross-entropies of all rollouts, one by one; ``log_probs_of``: tokens to [tokens, vocab]."""
    total = 0.0
    for tokens, mask, weight in zip(drawn["rollouts"], drawn["loss_masks"], drawn["weights"], strict=True):
        log_probs, each = log_probs_of(tokens), np.broadcast_to(weight, len(tokens))
        for i in range(1, len(tokens)):
            total = total - float(each[i]) * bool(mask[i]) * log_probs[i - 1, tokens[i]]
    return total


def weights_of(drawn: dict[str, Any]) -> dict[tuple[Path, int], float]:
    """Return the sum of a label's weights over all rollouts, by (prefix, label)."""
    sums: dict[tuple[Path, int], float] = {}
    for tokens, mask, weight in zip(drawn["rollouts"], drawn["loss_masks"], drawn["weights"], strict=True):
        each = np.broadcast_to(weight, len(tokens))
        for i in range(1, len(tokens)):
            if mask[i]:
                key = tuple(tokens[:i]), tokens[i]
                sums[key] = sums.get(key, 0) + float(each[i])
    return sums


class Policy(NamedTuple):
    """The parts of GRPO's loss of 7 rollouts in several rows, in float64."""

    rollouts: list[list[int]]
    packed: Rollouts
    x: np.ndarray
    """[rows tokens dim]: features of each slot."""
    weight: np.ndarray
    """[dim dim]"""
    head: np.ndarray
    """[vocab dim]"""
    advantages: np.ndarray
    """[7]"""
    old: list[np.ndarray]
    """The former log-probabilities of each rollout's tokens but the first."""

    def alone(self, values: Any) -> list[Any]:
        """Return the parts of values [rows tokens ...] that a rollout alone would have, at its tokens but the last."""
        flat, ends = values.reshape(-1, *values.shape[2:]), np.cumsum(self.packed.counts).tolist()
        slots = np.asarray(self.packed.predictors)
        return [flat[slots[end - count : end]] for end, count in zip(ends, self.packed.counts, strict=True)]


def policy() -> Policy:
    """Return rollouts of three prompts, one of them an exact repetition and one a prefix, cut into rows of at most 13 tokens."""
    rng = np.random.default_rng(5)
    first, second = [3, 1, 4, 1, 5], [2, 7]
    rollouts = [[*first, 9, 2, 6], [*second, 1, 8], [*first, 9, 5], [*first, 3], [*second, 1], [*first, 9, 2, 6], [0, 8, 8]]
    packed = pack_rollouts(rollouts, length=13)
    dim, vocab = 5, 10
    x, weight, head = (rng.standard_normal(shape) for shape in ((*packed.ids.shape, dim), (dim, dim), (vocab, dim)))
    old = [rng.standard_normal(count) * 0.3 - 2 for count in packed.counts]
    return Policy(rollouts, packed, x, weight, head, rng.standard_normal(len(rollouts)), old)
