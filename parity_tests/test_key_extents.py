"""What key_extents hide: as documents they equal extents, and as trees nothing leaks from a branch into its siblings."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from ring_attn_core.data.balanced_trees import balanced_tree_layout
from ring_attn_core.data.trees import tree_extents
from ring_attn_core.layouts import LAYOUTS

from .support.models import assert_near
from .support.rollouts import ancestors, drawn_tree
from .support.selection import first

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402

import ring_attn_jax  # noqa: E402
import ring_attn_torch  # noqa: E402

from .jax.ring import mesh_of  # noqa: E402
from .torch.models import rank_in, ranks_of  # noqa: E402

Arrays = dict[str, np.ndarray]

EVERY = [(ranks, layout) for ranks in (1, 2, 3, 4, 8) for layout in LAYOUTS]
BALANCED = [(ranks, "balanced") for ranks in (1, 2, 3, 4)]


def rings(always: dict[str, list[Any]], more: dict[str, list[Any]], every: list[Any]) -> Any:
    """Parametrize a test by framework and ring: ``always`` in make test, ``more`` in make test-all, ``every`` in --full."""
    cases = []
    for framework in ("jax", "torch"):
        begun = [*always[framework], *more[framework]]
        rest = [ring for ring in every if ring not in begun]
        cases += first([(framework, *ring) for ring in [*begun, *rest]], len(always[framework]), len(begun))
    return pytest.mark.parametrize(("attention", "ranks", "layout"), cases, indirect=["attention"])


def in_torch(gloo: Any, ranks: int, layout: Any, x: np.ndarray, cotangent: np.ndarray, **extents: np.ndarray) -> Arrays:
    """Attention of ``x`` over itself on a ring of gloo processes: out, and the gradient of ``x``, in natural order."""
    shards = gloo(ranks, on_rank, layout, x, cotangent, extents)
    whole = {name: torch.from_numpy(np.concatenate([shard[name] for shard in shards], 1)) for name in ("out", "dx")}
    return {name: ring_attn_torch.from_layout(y, layout, ranks, x.shape[1]).numpy() for name, y in whole.items()}


def on_rank(group: Any, layout: Any, x: np.ndarray, cotangent: np.ndarray, extents: Arrays) -> Arrays:
    ranks, rank = ranks_of(group), rank_in(group)
    mine = lambda y: ring_attn_torch.to_layout(torch.from_numpy(y), layout, ranks).chunk(ranks, 1)[rank]
    leaf = mine(x).clone().requires_grad_()
    hides: dict[str, Any] = {name: mine(y) for name, y in extents.items()}
    out = ring_attn_torch.ring_attention(leaf, leaf, leaf, layout=layout, length=x.shape[1], group=group, **hides)
    (dx,) = torch.autograd.grad(out, leaf, mine(cotangent))
    return {"out": out.detach().numpy(), "dx": dx.numpy()}


def in_jax(ranks: int, layout: Any, x: np.ndarray, cotangent: np.ndarray, **extents: np.ndarray) -> Arrays:
    """The same on a mesh of devices."""
    placed = lambda y: ring_attn_jax.to_layout(jnp.asarray(y), layout, ranks)
    with jax.enable_x64(True):
        given: dict[str, Any] = {"mesh": mesh_of(ranks), "layout": layout, "length": x.shape[1]}
        given |= {name: placed(y) for name, y in extents.items()}

        @jax.jit
        def both(x: Any, cotangent: Any) -> Any:
            out, back = jax.vjp(lambda x: ring_attn_jax.sharded_ring_attention(x, x, x, **given), x)
            return {"out": out, "dx": back(cotangent)[0]}

        found = both(placed(x), placed(cotangent))
        return {name: np.asarray(ring_attn_jax.from_layout(y, layout, ranks, x.shape[1])) for name, y in found.items()}


@pytest.fixture
def attention(request: pytest.FixtureRequest) -> Any:
    return in_jax if request.param == "jax" else partial(in_torch, request.getfixturevalue("gloo"))


@rings(
    {"jax": [], "torch": []},
    {"jax": [(2, "zigzag"), (3, "striped")], "torch": [(4, "zigzag"), (3, "contiguous"), (2, "striped")]},
    EVERY,
)
def test_key_extents_of_documents_are_their_extents(attention: Any, ranks: int, layout: str):
    rng = np.random.default_rng(8)
    x, cotangent = rng.standard_normal((2, 2, 37, 2, 8))
    extents = np.stack([ring_attn_torch.document_extents(torch.from_numpy(np.sort(rng.integers(0, 5, 37)))[None])[0] for _ in x])
    assert_near(
        attention(ranks, layout, x, cotangent, key_extents=extents),
        attention(ranks, layout, x, cotangent, extents=extents),
        1e-13,
    )


@rings(
    {"jax": [(2, "zigzag")], "torch": [(4, "zigzag"), (3, "balanced")]},
    {
        "jax": [(3, "balanced"), (3, "contiguous"), (1, "contiguous"), (4, "striped")],
        "torch": [(2, "striped"), (3, "contiguous"), (1, "contiguous"), (8, "striped"), (4, "balanced")],
    },
    [*EVERY, *BALANCED],
)
def test_a_branch_changes_no_bit_of_what_does_not_descend_from_it(attention: Any, ranks: int, layout: Any):
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
    before = attention(ranks, layout, x, cotangent, key_extents=key_extents)
    x[:, branch] = rng.standard_normal(x[:, branch].shape) * 100
    after = attention(ranks, layout, x, cotangent, key_extents=key_extents)
    for name in ("out", "dx"):
        np.testing.assert_array_equal(after[name][:, ~heirs], before[name][:, ~heirs])
    assert not np.array_equal(after["out"][:, heirs & ~branch], before["out"][:, heirs & ~branch])
    assert not after["dx"][:, heirs].any()
