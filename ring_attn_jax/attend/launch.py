"""Kernel launches inside a JAX program, by jaxlib's Triton custom call. XLA allocates each output that overwrites no input."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.kernels.compile import compile_launch, kernel_function
from ring_attn_core.kernels.launch import Descriptor, Launch, Scalar, encodings

from ..axes import axes_of

CUSTOM_CALL = "triton_kernel_call_ffi"
_target = jax.make_user_context(None)
"""The compute capability to trace for; None: the capability of this host's GPU.

It is part of JAX's cache keys, so a trace for one capability is not reused for another.
"""


def launch(launch: Launch, arrays: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Add a kernel launch to the JAX program as a custom call, and return its outputs.

    An output that overwrites an input shares the input's buffer; XLA copies the input first if a later operation reads it. A
    launch with an empty grid adds no call: an output is the input that it would overwrite, or 0.
    """
    arrays = {**arrays, **{name: jnp.zeros(x.shape, x.dtype) for name, x in launch.zeros.items()}}
    inputs = [arrays[name] for name in launch.inputs]
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in launch.written]
    if launch.grid == 0:
        outputs = [arrays[x.over] if x.over else jnp.zeros(x.shape, x.dtype) for x in launch.outputs]
    else:
        overwritten = {launch.inputs.index(x.over): i for i, x in enumerate(launch.written) if x.over}
        call = jax.ffi.ffi_call(CUSTOM_CALL, shapes, input_output_aliases=overwritten, vmap_method="sequential")
        outputs = call(*inputs, opaque=_opaque(launch, capability()))[: len(launch.outputs)]
    axes = frozenset().union(*map(axes_of, inputs))
    return tuple(_varying(x, axes) for x in outputs)


def _varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Mark ``x`` as varying over the mesh ``axes``, since shard_map assumes that a custom call's output is replicated."""
    missing = axes - axes_of(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


@lru_cache(maxsize=4096)
def _opaque(launch: Launch, capability: int) -> bytes:
    """Return the payload of the custom call: the compiled kernel, its grid, and how to pass each parameter."""
    from jaxlib import gpu_triton

    kernel = compile_launch(launch, capability)
    made = kernel.metadata
    descriptors = iter(encodings(kernel))
    arguments, parameters = dict(launch.arguments), []
    for name in kernel_function(launch.kernel).arg_names:
        if name in arguments:
            parameters += _parameters(gpu_triton, arguments[name], descriptors)
    ttir = kernel.asm.get("ttir", "")  # missing for Gluon kernels
    binary = gpu_triton.TritonKernel(made.name, made.num_warps, made.num_ctas, made.shared, kernel.asm["ptx"], ttir, capability)
    call = gpu_triton.TritonKernelCall(binary, launch.grid, 1, 1, parameters)
    return zlib.compress(call.to_proto(launch.kernel, b""))


def _parameters(gpu_triton: Any, x: Any, descriptors: Iterator[Any]) -> list[Any]:
    if isinstance(x, Scalar):
        return [gpu_triton.create_scalar_parameter(x.value, x.type)]
    if not isinstance(x, Descriptor):
        return [gpu_triton.create_array_parameter(0, 16)]
    shape, strides = list(x.shape), list(x.strides)
    descriptor = gpu_triton.create_tma_descriptor_parameter(shape=shape, strides=strides, oob_fill=0, **next(descriptors))
    sizes = [gpu_triton.create_scalar_parameter(size, "i32") for size in x.shape]
    return [descriptor, *sizes, *(gpu_triton.create_scalar_parameter(stride, "i64") for stride in x.strides)]


@lru_cache
def makes_descriptors() -> bool:
    """Return True if jaxlib's CUDA plugin can make TMA descriptors, that is, if a plugin newer than 0.11.0 is installed."""
    from jaxlib import gpu_triton

    return hasattr(gpu_triton, "create_tma_descriptor_parameter")


@contextmanager
def compile_for(capability: int) -> Iterator[None]:
    """Trace and lower for an NVIDIA GPU of compute capability ``capability``, such as 90, also on a host without such a GPU.

        with compile_for(90):
            jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",))

    Raise ValueError if ``capability`` is not in 50 .. 199. Raise ImportError if jaxlib's CUDA plugin, which builds the custom
    calls, is missing.
    """
    if not 50 <= capability < 200:
        raise ValueError(f"compile_for takes a compute capability without its point, such as 90 for 9.0, got {capability!r}")
    from jaxlib import gpu_triton

    if not hasattr(gpu_triton, "create_array_parameter"):
        install = f"pip install --no-deps jax-cuda12-plugin=={version('jaxlib')}"
        raise ImportError(f"a program for a GPU needs jaxlib's CUDA plugin, on a host without a GPU too: {install}")
    with _target(capability):
        yield


def capability() -> int:
    """Return the compute capability of the NVIDIA GPU to trace for, such as 90; 0 without an NVIDIA GPU."""
    target = _target.value
    return _of_this_host() if target is None else target


@lru_cache
def _of_this_host() -> int:
    if jax.default_backend() != "gpu":
        return 0
    major, _, minor = str(getattr(jax.devices()[0], "compute_capability", "")).partition(".")
    return 10 * int(major) + int(minor or 0) if major.isdigit() else 0


@lru_cache
def multiprocessors() -> int:
    """Return the number of SMs of the program's first GPU. Return 132 (an H100 SXM's) if JAX has no GPU or reports none."""
    return int(getattr(jax.devices()[0], "core_count", 0) or 132) if jax.default_backend() == "gpu" else 132
