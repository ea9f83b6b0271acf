"""Tests of key_extents: as documents they equal extents, and as trees they let nothing leak from a branch into its siblings."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ring_attn_core.data.balanced_trees import balanced_tree_layout
from ring_attn_core.data.trees import tree_extents
from ring_attn_core.layouts import LAYOUTS

from ..support.models import Arrays, assert_near
from ..support.rollouts import ancestors, drawn_tree
from ..support.selection import first, in_each

EVERY = [(ranks, layout) for ranks in (1, 2, 3, 4, 8) for layout in LAYOUTS]
BALANCED = [(ranks, "balanced") for ranks in (1, 2, 3, 4)]


def rings(always: int, begun: list[Any], every: list[Any]) -> list[Any]:
    """Return rings: the first few run in make test, those of ``begun`` in make test-all, and others with --full."""
    return first([*begun, *(ring for ring in every if ring not in begun)], always, len(begun))


def over_itself(attend: Any, x: Any, **options: Any) -> Any:
    return attend(x, x, x, **options)


def attention(framework: Any, ranks: int, layout: Any, x: np.ndarray, cotangent: np.ndarray, **extents: np.ndarray) -> Arrays:
    """Attention of ``x`` over itself: out, and the gradient of ``x``, in natural order."""
    with framework.x64():
        placed = lambda y: framework.to_layout(framework.array(y), layout, ranks)
        call = partial(over_itself, framework.ring_attention, layout=layout, length=x.shape[1])
        given = {name: placed(y) for name, y in extents.items()}
        (out,), (dx,) = framework.over_ring(ranks, call, [placed(x)], cotangents=[placed(cotangent)], **given)
        back = lambda y: np.asarray(framework.from_layout(framework.array(y), layout, ranks, x.shape[1]))
        return {"out": back(out), "dx": back(dx)}


@in_each(
    "ranks,layout",
    jax=rings(0, [(2, "zigzag"), (3, "striped")], EVERY),
    torch=rings(0, [(4, "zigzag"), (3, "contiguous"), (2, "striped")], EVERY),
)
def test_key_extents_of_documents_are_their_extents(framework, ranks, layout):
    rng = np.random.default_rng(8)
    x, cotangent = rng.standard_normal((2, 2, 37, 2, 8))
    documents = framework.array(np.stack([np.sort(rng.integers(0, 5, 37)) for _ in x]))
    extents = np.asarray(framework.document_extents(documents))
    both = (attention(framework, ranks, layout, x, cotangent, **{name: extents}) for name in ("key_extents", "extents"))
    assert_near(*both, relative=1e-13)


@in_each(
    "ranks,layout",
    jax=rings(1, [(2, "zigzag"), (3, "balanced"), (3, "contiguous"), (1, "contiguous"), (4, "striped")], [*EVERY, *BALANCED]),
    torch=rings(
        2,
        [(4, "zigzag"), (3, "balanced"), (2, "striped"), (3, "contiguous"), (1, "contiguous"), (8, "striped"), (4, "balanced")],
        [*EVERY, *BALANCED],
    ),
)
def test_a_branch_changes_no_bit_of_what_does_not_descend_from_it(framework, ranks, layout):
    rng = np.random.default_rng(9)
    parents, lengths = drawn_tree(rng, 12)
    layout = balanced_tree_layout(parents, lengths, ranks) if layout == "balanced" else layout
    key_extents = np.asarray(tree_extents(parents, lengths)[0])
    branch = np.repeat(np.arange(12), lengths) == 2  # a segment that is followed by tokens which do not see it
    (tokens,) = np.nonzero(branch)
    heirs = np.array([bool({*path} & {*tokens.tolist()}) for path in ancestors(parents, lengths)])
    assert 0 < heirs.sum() < heirs.size
    assert heirs.sum() > branch.sum()
    x, cotangent = rng.standard_normal((2, 1, heirs.size, 2, 8))
    cotangent[:, heirs] = 0
    before = attention(framework, ranks, layout, x, cotangent, key_extents=key_extents)
    x[:, branch] = rng.standard_normal(x[:, branch].shape) * 100
    after = attention(framework, ranks, layout, x, cotangent, key_extents=key_extents)
    for name in ("out", "dx"):
        np.testing.assert_array_equal(after[name][:, ~heirs], before[name][:, ~heirs])
    assert not np.array_equal(after["out"][:, heirs & ~branch], before["out"][:, heirs & ~branch])
    assert not after["dx"][:, heirs].any()
