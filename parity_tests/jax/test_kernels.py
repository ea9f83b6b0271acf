"""The Triton kernels in a JAX program for a GPU, lowered and exported on a host that has none."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec
from jaxlib import gpu_triton

from ring_attn_core import causal
from ring_attn_core.kernels import backends
from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_jax import TracedLayout, ring_attention, sharded_ring_attention
from ring_attn_jax.attend import launch
from ring_attn_jax.attend.launch import CUSTOM_CALL, capability, compile_for, makes_descriptors

pytest.importorskip("triton")


needs_plugin = pytest.mark.skipif(
    not hasattr(gpu_triton, "create_array_parameter"), reason="needs jaxlib's plugin: pip install --no-deps jax-cuda12-plugin"
)
needs_descriptors = pytest.mark.skipif(not makes_descriptors(), reason="a newer jaxlib makes TMA descriptors")
SEQ = PartitionSpec(None, "seq")


def ring(ranks: int, check_vma: bool = True, backend: str = "triton", **arguments):
    mesh = jax.make_mesh((ranks,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])
    attention = lambda q, k, v: ring_attention(q, k, v, backend=backend, **arguments)
    return jax.shard_map(attention, mesh=mesh, in_specs=(SEQ,) * 3, out_specs=SEQ, check_vma=check_vma)


def shapes(heads=4, kv_heads=2, tokens=512, dim=64, dtype=jnp.bfloat16):
    shape = lambda h: jax.ShapeDtypeStruct((1, tokens, h, dim), dtype)
    return shape(heads), shape(kv_heads), shape(kv_heads)


def lowered(function, *arguments) -> str:
    with compile_for(90):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def gradient(function):
    return lambda q, k, v: jax.grad(lambda *qkv: function(*qkv).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)


@pytest.fixture
def uncompiled(monkeypatch):
    """Programs are lowered with an empty payload in place of each compiled kernel: compiling them takes most of the time."""
    monkeypatch.setattr(launch, "_opaque", lambda each, capability: b"")
    monkeypatch.setattr(backends, "_obstacles", lambda call, problem, passes: {})


@needs_plugin
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=needs_descriptors)])
def test_a_step_is_one_launch_forward_and_one_or_two_backward(backend, ranks):
    text = lowered(gradient(ring(ranks, backend=backend)), *shapes())
    backward = ranks + 1 if backend == "hopper" else 2 * ranks
    assert text.count(f"@{CUSTOM_CALL}") == ranks + 1 + backward, (
        "forward steps, the sums, dq and dkv of every step or all and dq"
    )
    assert text.count("collective_permute") >= (ranks - 1) * 2


@needs_plugin
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("dim", "v_dim"), [(576, 512), (192, 128)])
@pytest.mark.parametrize("ranks", [1, 4])
def test_values_in_keys_are_one_launch_a_step_and_k_travels_alone(ranks, dim, v_dim):
    mesh = jax.make_mesh((ranks,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])
    attention = lambda q, k: ring_attention(q, k, v_dim=v_dim, backend="triton")
    q, k, _ = shapes(kv_heads=1, dim=dim)
    text = lowered(jax.shard_map(attention, mesh=mesh, in_specs=(SEQ,) * 2, out_specs=SEQ), q, k)
    assert text.count(f"@{CUSTOM_CALL}") == ranks
    sent = re.findall(r"collective_permute.*-> tensor<1x128x1x(\d+)xbf16>", text)
    assert sent == [str(dim)] * (ranks - 1)


@needs_plugin
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=needs_descriptors)])
def test_a_traced_layout_lowers_to_kernels(backend):
    """And its positions are an argument of the program, which other documents run too."""
    mesh = jax.make_mesh((4,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    layouts = [TracedLayout.of(balanced_layout(documents, 4)) for documents in ((512,), (100, 412))]
    call = lambda q, k, v, layout: sharded_ring_attention(q, k, v, mesh=mesh, layout=layout, backend=backend)
    loss = lambda q, k, v, layout: call(q, k, v, layout).astype(jnp.float32).sum()
    one, other = [lowered(jax.grad(loss, (0, 1, 2)), *shapes(), layout) for layout in layouts]
    assert one == other
    assert one.count(f"@{CUSTOM_CALL}") > 8


@needs_plugin
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("backend", "forward", "backward"), [("triton", 1, 3), pytest.param("hopper", 4, 5, marks=needs_descriptors)]
)
def test_needed_keys_are_one_step_of_kernels(backend, forward, backward):
    """For any number of ranks. Hopper's step also makes its lists of tiles."""
    for ranks in (2, 4):
        given = {"layout": balanced_layout((300, 212), ranks), "strategy": "direct", "backend": backend}
        assert lowered(ring(ranks, **given), *shapes()).count(f"@{CUSTOM_CALL}") == forward
        assert lowered(gradient(ring(ranks, **given)), *shapes()).count(f"@{CUSTOM_CALL}") == forward + 1 + backward


@needs_plugin
@pytest.mark.usefixtures("uncompiled")
@needs_descriptors
def test_the_zeros_that_dq_is_added_to_wait_for_their_layer():
    """XLA makes what depends on nothing for all layers of a model at once, and holds it."""
    text = lowered(gradient(ring(2, backend="hopper")), *shapes())
    zeros = re.findall(
        r"stablehlo.broadcast_in_dim (\S+), dims = \[\] : \(tensor<f32>\) -> tensor<\d+x\d+xf32>", text
    )  # 2-D, as the sums are
    waiting = re.findall(r"(%\d+):2 = stablehlo.optimization_barrier %\S+, %\S+ : tensor<f32>", text)
    assert set(waiting) & {name.partition("#")[0] for name in zeros}
    assert [name for name in zeros if "#" not in name] == []


@needs_plugin
@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=needs_descriptors)])
def test_the_kernels_of_a_gradient_compile(backend):
    """Those of a single step; core/ compiles those of the others."""
    assert CUSTOM_CALL in lowered(gradient(ring(1, backend=backend)), *shapes())


@needs_plugin
@needs_descriptors
def test_a_gluon_kernel_is_called_like_the_others(monkeypatch):
    """Its TMA descriptors are made by jaxlib, with the strides of a packed array; the launch names it."""
    launched = []
    opaque = launch._opaque.__wrapped__

    def opaque_of_one(each, capability):
        launched.append(each)
        return opaque(each, capability) if len(launched) == 1 else b""

    monkeypatch.setattr(launch, "_opaque", opaque_of_one)
    monkeypatch.setattr(backends, "_obstacles", lambda call, problem, passes: {})  # which compiles the backward too
    lowered(ring(2, backend="hopper"), *shapes())
    assert {each.kernel for each in launched} == {"hopper_forward"}
    assert [len(each.inputs) for each in launched] == [5, 7], "q, kv, kv, rows and the ticket; then out and lse too"


@needs_plugin
@pytest.mark.usefixtures("uncompiled")
def test_the_state_is_handed_on_in_place():
    """A step that is neither first nor last overwrites the out and the lse it is given."""
    text = lowered(ring(4), *shapes())
    assert text.count("output_operand_alias<") == 2 * 2 + 1, "out and lse at two steps, lse at the last, where out is cast"


@needs_plugin
@pytest.mark.usefixtures("uncompiled")
def test_it_lowers_under_remat_and_without_check_vma():
    assert CUSTOM_CALL in lowered(gradient(jax.checkpoint(ring(2))), *shapes())
    assert CUSTOM_CALL in lowered(gradient(ring(2, check_vma=False)), *shapes())


@needs_plugin
@pytest.mark.usefixtures("uncompiled")
def test_under_vmap_it_is_one_call_after_the_other():
    batched = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in shapes()]
    assert CUSTOM_CALL in lowered(jax.vmap(ring(1)), *batched)


@needs_plugin
def test_it_is_exported_for_cuda_from_a_cpu(monkeypatch):
    monkeypatch.setattr(backends, "_obstacles", lambda call, problem, passes: {})  # which compiles the backward too
    allowed = [jax.export.DisabledSafetyCheck.custom_call(CUSTOM_CALL)]
    with compile_for(90):
        exported = jax.export.export(jax.jit(ring(1, mask=causal())), platforms=("cuda",), disabled_checks=allowed)(*shapes())
    assert exported.platforms == ("cuda",)
    assert CUSTOM_CALL in exported.mlir_module()


@needs_plugin
@pytest.mark.usefixtures("uncompiled")
def test_a_trace_for_one_gpu_is_not_used_for_another():
    """JAX keeps the traces of a function, and sharded_ring_attention its jitted function."""
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(AxisType.Auto,))
    attention = jax.jit(lambda q, k, v: sharded_ring_attention(q, k, v, mesh=mesh))
    allowed = [jax.export.DisabledSafetyCheck.custom_call(CUSTOM_CALL)]
    q, k, v = (jnp.ones(x.shape, x.dtype) for x in shapes(tokens=32))
    plain = attention(q, k, v)
    calls = {}
    for gpu in (90, 75, 80):
        with compile_for(gpu):
            text = jax.export.export(attention, platforms=("cuda",), disabled_checks=allowed)(q, k, v).mlir_module()
        calls[gpu] = text.count(f"@{CUSTOM_CALL}")
    assert calls[90] > 0
    assert calls[75] == 0
    assert calls[80] > 0
    with compile_for(75), pytest.raises(ValueError, match="triton"):
        jax.eval_shape(ring(1, backend="triton"), q, k, v)
    assert jnp.array_equal(attention(q, k, v), plain), "back on this host"


@needs_plugin
@pytest.mark.usefixtures("uncompiled")
def test_without_tma_descriptors_hopper_is_refused_by_name_and_auto_takes_the_portable_kernels(monkeypatch):
    monkeypatch.setattr("ring_attn_jax.call.prepare.makes_descriptors", lambda: False)
    with compile_for(90), pytest.raises(ValueError, match=r'this jaxlib cannot make: .*"auto" takes .triton'):
        jax.eval_shape(ring(1, backend="hopper"), *shapes())
    launched = []
    monkeypatch.setattr(launch, "_opaque", lambda each, capability: launched.append(each) or b"")
    lowered(ring(1, backend="auto"), *shapes(dim=32))
    assert {each.kernel for each in launched} == {"forward"}


def test_an_invalid_compute_capability_is_refused():
    with pytest.raises(ValueError, match=r"90 for 9\.0, got 9"), compile_for(9):
        pass


def test_without_jaxlibs_plugin_no_program_for_a_gpu_is_made(monkeypatch):
    monkeypatch.delattr(gpu_triton, "create_array_parameter", raising=False)
    with pytest.raises(ImportError, match="pip install --no-deps jax-cuda12-plugin=="), compile_for(90):
        pass


def test_without_a_gpu_the_kernels_say_what_runs_instead():
    assert capability() == 0
    with pytest.raises(ValueError, match="run on NVIDIA GPUs, and these arrays are on cpu"):
        jax.eval_shape(ring(1), *shapes())
    assert isinstance(makes_descriptors(), bool)
