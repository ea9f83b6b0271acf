"""The call in the world of JAX: shard_map with check_vma, meshes, remat, replicated inputs, what is compiled and refused."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import re
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ring_attn_core import LAYOUTS, Band, causal, full, sliding_window
from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_jax import TracedLayout, attend_block, from_layout, ring_attention, sharded_ring_attention, to_layout
from ring_attn_jax.call.autograd import LSE_NAME, OUT_NAME

from ..support.cases import MASKS, Case
from ..support.selection import first
from .ring import SEQ, mesh_of, options

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def arrays(heads=4, kv_heads=2, batch=2, tokens=16, dim=8):
    rng = np.random.default_rng(0)
    make = lambda h: jnp.asarray(rng.standard_normal((batch, tokens, h, dim)), jnp.float32)
    return make(heads), make(kv_heads), make(kv_heads)


def gradients(attention):
    """(q, k, v) -> the gradients of a loss whose cotangents differ everywhere, compiled."""
    return jax.jit(jax.grad(lambda q, k, v: jnp.sum(jnp.sin(attention(q, k, v))), (0, 1, 2)))


def permutes(function, *inputs) -> int:
    """Count the ppermutes of the traced program."""
    return str(jax.make_jaxpr(function)(*inputs)).count("ppermute[")


@pytest.mark.parametrize("ranks", first([3, 1, 2, 8], 0, 1))
@pytest.mark.parametrize("mask", [*MASKS.values(), sliding_window(0), sliding_window(3, offset=-40)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hops_are_the_plans(layout, mask, ranks):
    case = Case(layout, mask, ranks=ranks, length=61)
    plan = case.plan
    ring = partial(sharded_ring_attention, mesh=mesh_of(ranks), **options(plan))
    q, k, v = (jnp.asarray(np.concatenate(shards, 1)) for shards in case.inputs()[:3])
    assert permutes(ring, q, k, v) == len(plan.hops)
    assert permutes(gradients(ring), q, k, v) == len(plan.hops) * 3 + (plan.home > 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "kv_heads"), first([(kind, n) for n, kind in product((2, 1, 4), KINDS.values())], 1, 4))
def test_a_data_seq_tensor_mesh_equals_one_device_and_gathers_nothing(kind, kv_heads):
    inputs = arrays(kv_heads=kv_heads)
    mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "tensor"), axis_types=(kind,) * 3)
    ring = partial(sharded_ring_attention, mesh=mesh, batch_axes="data", head_axis="tensor")
    compiled = gradients(ring).lower(*map(in_layout, inputs)).compile()
    assert "all-gather" not in re.sub(r"metadata=\{[^}]*\}", "", compiled.as_text())
    mine = compiled(*map(in_layout, inputs))
    for a, b in zip(mine, on_one_device(kv_heads), strict=True):
        assert relative_error(np.asarray(from_layout(np.asarray(a), "zigzag", 2, 16)), np.asarray(b)) <= 1e-6


@cache
def on_one_device(kv_heads=2):
    """The gradients of ``arrays``."""
    return gradients(partial(sharded_ring_attention, mesh=mesh_of(1)))(*arrays(kv_heads=kv_heads))


def in_layout(x):
    return np.asarray(to_layout(np.asarray(x), "zigzag", 2))


@pytest.mark.parametrize("replicated", first(["tensor", "data"]))
def test_gradients_of_inputs_replicated_over_another_axis_are_summed_over_it(replicated):
    """q differs over the axis, k and v do not: their gradients are the sum over its members."""
    inputs = arrays(heads=2, kv_heads=1)
    mesh = jax.make_mesh((2, 2), (replicated, "seq"), axis_types=(AxisType.Auto,) * 2)
    over = PartitionSpec(None, "seq", replicated)
    ring = jax.shard_map(partial(ring_attention, layout="striped"), mesh=mesh, in_specs=(over, SEQ, SEQ), out_specs=over)
    mine = gradients(ring)(*(to_layout(x, "striped", 2) for x in inputs))
    truth = gradients(partial(sharded_ring_attention, layout="striped", mesh=mesh_of(1)))(*inputs)
    for a, b in zip(mine, truth, strict=True):
        assert relative_error(np.asarray(from_layout(a, "striped", 2, 16)), np.asarray(b)) <= 1e-6


@pytest.mark.parametrize(("keep", "forwards"), [(True, 1), (False, 2)], ids=["out and lse kept", "everything recomputed"])
def test_remat_runs_one_forward_ring_where_out_and_lse_are_kept(keep, forwards):
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(OUT_NAME, LSE_NAME) if keep else policies.nothing_saveable
    ring = partial(sharded_ring_attention, mesh=mesh_of(4))
    block = jax.checkpoint(lambda q, k, v: ring(jnp.sin(q), jnp.sin(k), jnp.sin(v)), policy=policy)
    assert permutes(gradients(block), *arrays()) == 3 * forwards + 3 + 4


def test_the_backward_keeps_q_k_v_out_lse_and_its_rest_only():
    q, k, v = arrays()
    _, vjp = jax.vjp(jax.jit(partial(sharded_ring_attention, mesh=mesh_of(4))), q, k, v)
    sizes = sorted(x.size for x in jax.tree.leaves(vjp) if x.size > 1)
    lse = q.size // q.shape[-1]
    assert sizes == sorted([q.size, k.size, v.size, q.size, lse, lse])


@pytest.mark.exhaustive
def test_without_check_vma_results_are_the_same():
    call = partial(ring_attention, layout="striped")
    rings = [jax.shard_map(call, mesh=mesh_of(2), in_specs=(SEQ,) * 3, out_specs=SEQ, check_vma=on) for on in (True, False)]
    for a, b in zip(*(gradients(ring)(*arrays()) for ring in rings), strict=True):
        assert relative_error(np.asarray(a), np.asarray(b)) <= 1e-6


def test_a_second_derivative_raises_instead_of_being_wrong():
    q, k, v = arrays()
    ring = jax.jit(lambda q: sharded_ring_attention(q, k, v, mesh=mesh_of(1)).sum())
    with pytest.raises(RuntimeError, match="no second derivative"):
        jax.grad(lambda q: jax.grad(ring)(q).sum())(q)


NAMES = SimpleNamespace(shape=3)  # as of nnx.Rngs, which has any attribute
WRONG = {  # what only JAX can get wrong, and some of what core/test_problem.py checks, to show that a call is checked
    "kv heads must divide": lambda q, k, v: ((q, k[:, :, :1].repeat(3, 2), v[:, :, :1].repeat(3, 2)), {}),
    "unknown backend 'abacus'": lambda q, k, v: ((q, k, v), {"backend": "abacus"}),
    "axis_name must be the name": lambda q, k, v: ((q, k, v), {"axis_name": None}),
    "mask.lo must be int or None": lambda q, k, v: ((q, k, v), {"mask": Band(jnp.int32(0))}),
    "has no axis 'sequence': its axes are seq, pass axis_name='seq'": lambda q, k, v: ((q, k, v), {"axis_name": "sequence"}),
    "has no axis 'rows': its axes are seq, make a mesh with": lambda q, k, v: ((q, k, v), {"batch_axes": "rows"}),
    "mask must be full": lambda q, k, v: ((q, k, v), {"mask": None}),
    "got the function causal: call it, mask=causal(...)": lambda q, k, v: ((q, k, v), {"mask": causal}),
    "kv_length=99 is more than": lambda q, k, v: ((q, k, v), {"kv_length": 99, "mask": full()}),
    "needs an even number of tokens a rank, got 7": lambda q, k, v: ((q[:, :14], k[:, :14], v[:, :14]), {}),
    "to_layout, which pads": lambda q, k, v: ((q[:, :15], k[:, :15], v[:, :15]), {}),
    "jax_enable_x64": lambda q, k, v: (tuple(np.asarray(x, np.float64) for x in (q, k, v)), {}),
    "bits(key)), got a PRNG key": lambda q, k, v: ((q, k, v), {"dropout_rate": 0.5, "dropout_seed": jax.random.key(0)}),
    "bits(key)), got a PRNG key array": lambda q, k, v: ((q, k, v), {"dropout_rate": 0.5, "dropout_seed": jax.random.PRNGKey(0)}),
    "bits(key)), got SimpleNamespace": lambda q, k, v: (
        (q, k, v),
        {"dropout_rate": 0.5, "dropout_seed": SimpleNamespace(shape=3)},
    ),
    "jax.random.bits(key)), got False": lambda q, k, v: ((q, k, v), {"dropout_rate": 0.5, "dropout_seed": False}),
    "extents must be 0 <= first <= end": lambda q, k, v: ((q, k, v), {"extents": np.full((2, 16, 2), [3, 2])}),
    "key_extents must be 0 <= first <= end": lambda q, k, v: ((q, k, v), {"key_extents": np.full((2, 16, 2), [3, 17])}),
    "key_mask must be an array, got list": lambda q, k, v: ((q, k, v), {"key_mask": [True]}),
    "unknown strategy": lambda q, k, v: ((q, k, v), {"strategy": "telepathy"}),
    "in PyTorch only": lambda q, k, v: ((q, k, v), {"strategy": "push"}),
    "take strategy='push'": lambda q, k, v: ((q, k, v), {"strategy": "pull"}),
    "named twice": lambda q, k, v: ((q, k, v), {"batch_axes": "seq"}),
    "batch_axes must be the name of a mesh axis": lambda q, k, v: ((q, k, v), {"batch_axes": None}),
    "or a tuple of names, got": lambda q, k, v: ((q, k, v), {"batch_axes": [["seq"]]}),
    "head_axis must be the name of a mesh axis, or None": lambda q, k, v: ((q, k, v), {"head_axis": ["seq"]}),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_mistake_is_a_value_error_at_trace_time(message):
    inputs, arguments = WRONG[message](*arrays())
    with pytest.raises(ValueError, match=re.escape(message)):
        sharded_ring_attention(*inputs, mesh=mesh_of(2), **arguments)


@pytest.mark.parametrize("layout", ["contiguous", TracedLayout.of(balanced_layout((9, 7), 2))], ids=["contiguous", "traced"])
def test_inside_shard_map_a_list_is_refused(layout):
    place = PartitionSpec(None, "seq")
    ring = lambda x: ring_attention([1.0], x, x, axis_name="seq", layout=layout)
    call = jax.shard_map(ring, mesh=mesh_of(2), in_specs=place, out_specs=place)
    with pytest.raises(ValueError, match="q, k and v must be arrays, got list"):
        call(arrays()[0])


@pytest.mark.parametrize("over", [{"seq"}, {"data", "seq"}])
def test_global_arrays_inside_a_shard_map_over_the_ring_are_refused(over):
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    for call in (partial(sharded_ring_attention, mesh=mesh), sharded_ring_attention):
        with pytest.raises(ValueError, match=r"inside a shard_map over 'seq', so its arrays are shards: call ring_attention"):
            jax.eval_shape(jax.shard_map(call, mesh=mesh, in_specs=(SEQ,) * 3, out_specs=SEQ, axis_names=over), *arrays())


def test_outside_shard_map_the_remedy_is_named():
    q, k, v = arrays()
    with pytest.raises(ValueError, match=r"inside jax.shard_map.*sharded_ring_attention"):
        ring_attention(q, k, v)


@pytest.mark.parametrize(
    "mask", first([causal(2**31 - 1), sliding_window(2**31 - 1, 8), causal(2**40), sliding_window(2**31, 2**31)], 0, 2), ids=str
)
@pytest.mark.parametrize("layout", first(LAYOUTS, 1, 1))
def test_a_mask_wider_than_int32_sees_what_a_wide_one_sees(layout, mask):
    wide = sliding_window(99, 8) if mask.lo == -8 else full()
    call = partial(sharded_ring_attention, *arrays(), mesh=mesh_of(2), layout=layout)
    np.testing.assert_array_equal(call(mask=mask), call(mask=wide))


def test_outside_jit_a_repeated_call_compiles_nothing():
    q, k, v = arrays()
    call = partial(sharded_ring_attention, mesh=mesh_of(2), scale=0.77)
    call(q, k, v)
    other = q + 1
    with jax.no_tracing():
        call(other, k, v)


@pytest.mark.parametrize("shape", [(0, 8, 2, 4), (2, 0, 2, 4)], ids=["no batch", "no tokens"])
def test_nothing_in_gives_nothing_out(shape):
    x = jnp.zeros(shape)
    attention = lambda x: sharded_ring_attention(x, x, x, mesh=mesh_of(2)).sum()
    assert jax.grad(attention)(x).shape == shape


@pytest.mark.exhaustive
def test_nan_that_reaches_a_query_which_sees_nothing_reaches_no_key():
    ring = partial(sharded_ring_attention, mesh=mesh_of(2), layout="contiguous", mask=causal(offset=-3), return_lse=True)
    (out, lse), vjp = jax.vjp(ring, *arrays())
    cotangents = out / (lse > -jnp.inf)[..., None], jnp.square(lse)
    assert all(jnp.isfinite(gradient).all() for gradient in vjp(cotangents))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", first((kind,) for kind in KINDS.values()), ids=KINDS)
def test_a_shard_map_over_the_ring_alone_equals_one_device(kind):
    """Batch and heads stay outside of it: sharded over Auto axes by XLA, over Explicit ones by their types."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "tensor"), axis_types=(kind,) * 3)
    call = partial(ring_attention, layout="contiguous", dropout_rate=0.25, dropout_seed=3)
    ring = jax.shard_map(
        lambda q, k, v, sinks: call(q, k, v, sinks=sinks),
        mesh=mesh,
        in_specs=(SEQ, SEQ, SEQ, PartitionSpec()),
        out_specs=SEQ,
        axis_names={"seq"},
    )
    loss = lambda attention: lambda *inputs: jnp.sum(jnp.sin(attention(*inputs)))
    inputs = *arrays(kv_heads=1), jnp.linspace(-1, 1, 4)
    one = partial(sharded_ring_attention, mesh=mesh_of(1), layout="contiguous", dropout_rate=0.25, dropout_seed=3)
    truth = jax.jit(jax.grad(loss(lambda q, k, v, sinks: one(q, k, v, sinks=sinks)), (0, 1, 2, 3)))(*inputs)
    over = *("data", "seq", "tensor"), *("data", "seq", None) * 2, "tensor"
    specs = PartitionSpec(*over[:3]), PartitionSpec(*over[3:6]), PartitionSpec(*over[6:9]), PartitionSpec("tensor")
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(inputs, specs, strict=True)]
        mine = jax.jit(jax.grad(loss(ring), (0, 1, 2, 3)))(*placed)
    for a, b in zip(mine, truth, strict=True):
        assert relative_error(np.asarray(a), np.asarray(b)) <= 1e-6


@pytest.mark.parametrize("call", first(["block", "ring"]))
def test_a_shard_map_over_the_ring_alone_needs_no_jit_on_explicit_axes(call):
    """Forward outside jit; the gradients of a block, whose loops carry zeros of their own too, inside."""
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(AxisType.Explicit,) * 2)
    attention = {"ring": partial(ring_attention, layout="contiguous"), "block": lambda *qkv: attend_block(*qkv)[0]}[call]
    ring = jax.shard_map(attention, mesh=mesh, in_specs=(SEQ,) * 3, out_specs=SEQ, axis_names={"seq"})
    inputs = arrays()
    halves = [[x[:, :8] for x in inputs], [x[:, 8:] for x in inputs]]
    alone = lambda *x: attend_block(*x)[0]
    gradients_alone = gradients(alone)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "seq"))) for x in inputs]
        out, mine = np.asarray(ring(*placed)), [np.asarray(x) for x in gradients(ring)(*placed)]
    if call == "ring":
        truth, of_inputs = alone(*inputs), gradients_alone(*inputs)
    else:
        truth = np.concatenate([alone(*half) for half in halves], 1)
        of_inputs = [np.concatenate(parts, 1) for parts in zip(*(gradients_alone(*half) for half in halves), strict=True)]
    for a, b in zip((out, *mine), (truth, *of_inputs), strict=True):
        assert relative_error(a, np.asarray(b)) <= 1e-6


@pytest.mark.parametrize("passes", [1, 2], ids=["forward", "forward and backward"])
def test_no_hop_begins_before_the_step_before_it_has_ended(passes):
    """A barrier ties what arrives to what was computed meanwhile, and the next hop sends what comes out of it.

    Without it XLA sends everything in the beginning, where nothing overlaps and memory grows with the ranks.
    """
    ring = partial(sharded_ring_attention, mesh=mesh_of(4), layout="striped")
    text = (jax.jit(ring) if passes == 1 else gradients(ring)).lower(*arrays()).as_text()
    arrived = re.findall(r'(%\w+) = "stablehlo.collective_permute"\((%\w+)', text)
    ties = {made: re.findall(r"%\w+", of) for made, of in re.findall(r"(%\w+):\d+ = stablehlo.optimization_barrier (.*) :", text)}
    assert len(ties) == passes * 3
    results = [made for made, _ in arrived]
    for operands in ties.values():
        assert sum(operand in results for operand in operands) == 1
        assert len(operands) > 1
    onward = [operand for _, operand in arrived if operand in ties]
    assert len(onward) >= passes * 2, "every hop but the first of a pass"
