"""Generation in JAX, in this process. Imported only if JAX is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType

from ring_attn_jax import load_llama, load_weights

from ..train.jax_mesh import place
from .settings import GenerateSettings


def run(settings: GenerateSettings, ids: list[int], tell: Callable[[str, Any], None]) -> None:
    """Generate on accelerators if there are enough for all ranks, else on CPU devices. ``tell``: as ``GenerateWatch``."""
    jax.config.update("jax_num_cpu_devices", settings.ranks)
    dtypes = [settings.dtype, *(settings.config.get(name) for name in ("param_dtype", "compute_dtype", "dtype", "torch_dtype"))]
    if "float64" in dtypes:
        jax.config.update("jax_enable_x64", True)
    devices = jax.devices() if len(jax.devices()) >= settings.ranks else jax.devices("cpu")
    if len(devices) < settings.ranks:
        raise ValueError(f"--ranks {settings.ranks}, and jax has {len(devices)} devices: pass fewer")
    mesh = jax.make_mesh((settings.ranks,), ("seq",), axis_types=(AxisType.Auto,), devices=devices[: settings.ranks])
    load = load_llama if settings.llama else load_weights
    with jax.default_device(jax.local_devices(backend="cpu")[0] if settings.shard_weights else None):
        model = load(settings.weights, dtype=settings.dtype, mesh=mesh)
    if settings.shard_weights:
        place(model, mesh, sharded=True)
    weights = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    tell("loaded", f"{weights:,} weights on {settings.ranks} x {devices[0].device_kind}")
    on_token = lambda request, token: tell("token", token)
    progress = lambda done, total: tell("prefilled", (done, total))
    model.generate([ids], **settings.arguments, on_token=on_token, progress=progress)
