"""The strategies of JAX: exact under check_vma, the same bits at every run, and what they send."""

# pyright: reportArgumentType=false

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from ring_attn_core import Gather, TwoLevel, Ulysses, full, sliding_window
from ring_attn_core.problem.traffic import traffic
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_jax import from_layout, sharded_ring_attention, to_layout

from ..support.cases import Case, check_same
from ..support.selection import first, one_of_each
from ..support.strategies import BY_HEADS, EACH, ONE_EACH, SHARED, STRATEGIES, fitted, problem_of
from .ring import hops_tied_to_steps, mesh_of, program, run, whole

LAST_FIRST = dict(reversed(STRATEGIES.items()))
OTHERS = [case for case in EACH if case not in ONE_EACH]
TRAVELS = [
    *ONE_EACH,
    *SHARED,
    *BY_HEADS[:2],
    *(Case("contiguous", strategy=strategy, mask=sliding_window(3), ranks=8, heads=8) for strategy in STRATEGIES.values()),
    *(Case("contiguous", strategy=strategy, mask=sliding_window(0)) for strategy in STRATEGIES.values()),
    Case(order="global", extents="documents", key_mask="random", v_dim=7),
]


@pytest.mark.parametrize("case", [*one_of_each(2, TRAVELS), *first(OTHERS, 0, 0)], ids=str)
def test_bytes_are_the_plans(case):
    for rank, counted in enumerate(traced_bytes(case)):
        forward, backward = traffic(problem_of(case, "jax"), rank)
        assert counted == forward.bytes + backward.bytes


def traced_bytes(case: Case) -> list[int]:
    """The bytes that each rank sends in forward and backward, read off the traced program.

    A permute sends its operand, an all-to-all and an all-gather what is not the rank's own.
    """
    q, k, v, dout, dlse, *features = whole(case)
    arrays = [jax.ShapeDtypeStruct(x.shape, case.dtype) for x in (q, k, v, dout)]
    arguments = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in zip(case.features, features, strict=True)}
    dlse = jax.ShapeDtypeStruct(dlse.shape, dlse.dtype)
    traced = program.__wrapped__(case, True).trace(*arrays, dlse, arguments).jaxpr
    return [sum(sent(traced.jaxpr, case.ranks, rank)) for rank in range(case.ranks)]


def sent(jaxpr: Any, ranks: int, rank: int) -> Iterator[int]:
    """The bytes that ``rank`` sends in each collective of a traced program, those inside its functions too."""
    for equation in jaxpr.eqns:
        of: Any = equation.invars[0].aval if equation.invars else None
        groups = equation.params.get("axis_index_groups")
        size = len(groups[0]) if groups else ranks
        if equation.primitive.name == "ppermute":
            yield prod(of.shape) * of.dtype.itemsize * any(rank == sender for sender, _ in equation.params["perm"])
        elif equation.primitive.name == "all_to_all":
            yield prod(of.shape) * of.dtype.itemsize * (size - 1) // size
        elif equation.primitive.name == "all_gather":
            yield prod(of.shape) * of.dtype.itemsize * (size - 1)
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from sent(inner, ranks, rank)


@pytest.mark.parametrize("strategy", first(STRATEGIES.values(), 0, 2), ids=STRATEGIES)
def test_ten_runs_give_the_same_bits(strategy):
    case = fitted(Case(strategy=strategy, kv_heads=1, sinks=True))
    results = [run.__wrapped__(case) for _ in range(10)]
    for again in results[1:]:
        check_same(again, results[0])


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("strategy", first(["ring", *STRATEGIES.values()]), ids=["ring", *STRATEGIES])
@pytest.mark.parametrize("delays", first([2, 100], 1, 1, "campaign"))
def test_ranks_that_are_late_at_random_give_the_same_bits(strategy, delays):
    case = fitted(Case(strategy=strategy, kv_heads=1, sinks=True))
    expected, waits, draw = run(case), [], random.Random(0)
    program.cache_clear()
    try:
        with patch.multiple(lax, **{name: late(getattr(lax, name), waits, draw) for name in COLLECTIVES}):
            for _ in range(delays):
                check_same(run.__wrapped__(case), expected)
    finally:
        program.cache_clear()
        jax.clear_caches()
    assert len(waits) >= delays * case.ranks


COLLECTIVES = "ppermute", "all_gather", "all_to_all"


def late(collective: Any, waits: list[float], draw: random.Random) -> Any:
    """``collective``, before which each rank waits for a time of its own, drawn anew at each run."""

    def call(x: Any, *arguments: Any, **keywords: Any) -> Any:
        def wait() -> np.ndarray:
            waits.append(draw.uniform(0, 0.01))
            time.sleep(waits[-1])
            return np.zeros((), bool)

        waited = jax.pure_callback(wait, jax.ShapeDtypeStruct((), bool))
        x = jax.tree.map(lambda x: jnp.where(waited, jnp.zeros_like(x), x), x)
        return collective(x, *arguments, **keywords)

    return call


def arrays(heads: int = 8, kv_heads: int = 2, tokens: int = 16) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((2, tokens, h, 8)), jnp.float32) for h in (heads, kv_heads, kv_heads)]


def gradients(attention: Any) -> Any:
    return jax.jit(jax.grad(lambda q, k, v: jnp.sum(jnp.sin(attention(q, k, v))), (0, 1, 2)))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy"), first([(AxisType.Auto, "ulysses"), (AxisType.Explicit, "gather"), (AxisType.Explicit, "ulysses")], 1, 2)
)
def test_a_data_seq_tensor_mesh_equals_one_device(kind, strategy):
    """Keys of one head are replicated over tensor: their gradients are summed over it too."""
    inputs = arrays(kv_heads=1)
    mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "tensor"), axis_types=(kind,) * 3)
    ring = partial(sharded_ring_attention, mesh=mesh, batch_axes="data", head_axis="tensor", strategy=strategy)
    mine = gradients(ring)(*(np.asarray(to_layout(np.asarray(x), "zigzag", 2)) for x in inputs))
    truth = gradients(partial(sharded_ring_attention, mesh=mesh_of(1)))(*inputs)
    for a, b in zip(mine, truth, strict=True):
        assert relative_error(np.asarray(from_layout(np.asarray(a), "zigzag", 2, 16)), np.asarray(b)) <= 1e-6


def test_groups_wait_for_each_step_before_the_next_hop():
    """A ring of four groups of two has as many barriers and permutes as one of four ranks, and no other collective."""
    ring = partial(sharded_ring_attention, mesh=mesh_of(8), layout="striped", strategy=Ulysses(ranks=2))
    text = gradients(ring).lower(*arrays()).as_text()
    assert len(re.findall("stablehlo.optimization_barrier", text)) == 2 * 3
    assert len(re.findall('"stablehlo.collective_permute"', text)) == 3 + 3 + 4
    assert "all_gather" not in text


def test_two_levels_wait_for_each_step_before_the_next_hop():
    """Two hosts of four ranks: a barrier between any two steps; 3 hops a host and one crossing; gradients also go home."""
    ring = partial(sharded_ring_attention, mesh=mesh_of(8), layout="striped", strategy=TwoLevel(ranks=4))
    text = gradients(ring).lower(*arrays()).as_text()
    assert len(re.findall("stablehlo.optimization_barrier", text)) == 2 * 7
    assert len(re.findall('"stablehlo.collective_permute"', text)) == 7 + 7 + (4 + 4 + 2)


def test_both_ways_wait_for_each_step_before_the_next_hop():
    """Check that each barrier ties a step to the next one's keys. All hops but the first of a way send its results."""
    ring = partial(sharded_ring_attention, mesh=mesh_of(8), layout="striped", strategy="two_way")
    text = gradients(ring).lower(*arrays()).as_text()
    permutes, ties = hops_tied_to_steps(text, others=1)
    assert len([operand for _, operand in permutes if operand in ties]) >= 2 * (7 - 2)


@pytest.mark.parametrize("strategy", first(LAST_FIRST.values(), 0, 2), ids=LAST_FIRST)
def test_vmap_maps_every_strategy(strategy):
    inputs = [jnp.stack([x, 2 * x]) for x in arrays(heads=4)]
    ring = partial(sharded_ring_attention, mesh=mesh_of(4), mask=full(), strategy=strategy)
    mapped = jax.jit(jax.vmap(ring))(*inputs)
    expected = ring(*(x[1] for x in inputs))
    assert relative_error(np.asarray(mapped[1]), np.asarray(expected)) <= 1e-6


def test_keys_of_a_group_of_heads_wait_for_the_step_before_the_last_one_only():
    """So those of the next group travel beside a step, and a rank holds two groups. No gradients wait for a later step."""
    ring = partial(sharded_ring_attention, mesh=mesh_of(4), layout="striped", strategy=Gather(groups=4))
    text = gradients(ring).lower(*arrays(kv_heads=4)).as_text()
    found = {name: list(awaited(text, name)) for name in ("all_gather", "all_to_all")}
    forward, backward = found["all_gather"][:4], found["all_gather"][4:]
    assert [each.get("attend", 0) for each in forward] == [0, 0, 1, 1]
    assert [each.get("attend_backward", 0) for each in backward] == [0, 0, 1, 2]
    assert [each.get("all_to_all", 0) for each in backward] == [0, 0, 0, 1]
    assert [each["attend_backward"] for each in found["all_to_all"]] == [1, 2, 2, 3]


def awaited(text: str, name: str) -> Iterator[Counter[str]]:
    """Yield for each collective of this name in a lowered program how many steps and exchanges of its function it waits for."""
    before: dict[str, set[str]] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if "func.func" in line:
            before, kinds = {}, {}
        if (made := re.match(r" *(%\w+)(?::\d+)? = (.*)", line)) is None:
            continue
        result, operation = made.groups()
        operands = re.findall(r"%\w+", operation)
        before[result] = set(operands).union(*(before.get(x, ()) for x in operands))
        if (kind := re.search(r"@(attend\w*)\(|stablehlo\.(all_to_all)", operation)) is not None:
            kinds[result] = kind[1] or kind[2]
        if f"stablehlo.{name}" in operation:
            yield Counter(kinds[x] for x in before[result] if x in kinds)
