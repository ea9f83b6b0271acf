"""A worker process in JAX: all ranks of the comparison's rings, each a device. Only processes that run JAX import this module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import ring_attn_jax

from ..processes import Worker
from .messages import Change, Outcome, Request, WorkerSettings, cut
from .oracles import GlobalArrays, Oracle
from .worker import CAST, Arrays, Call, CallRunner, Loaded, Prepared, load, make_importable, serve

SEQ, WHOLE = PartitionSpec(None, "seq"), PartitionSpec()


def work(worker: Worker, rank: int, settings: WorkerSettings) -> None:
    """Report this process's devices, then answer requests for all ranks; stop after the report if GPUs are too few."""
    if settings.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", settings.most)
        devices, kind = jax.devices(), "cpu"
    else:
        jax.config.update("jax_pjrt_client_create_options", {"preallocate": False})  # PyTorch's processes share these GPUs
        jax.config.update("jax_default_matmul_precision", "highest")  # by default XLA rounds float32 factors to tf32 on GPUs
        devices = jax.devices() if jax.default_backend() == "gpu" else []
        kind = devices[0].device_kind if devices else "none"
    worker("ready", (rank, {"devices": len(devices), "kind": kind}))
    if len(devices) >= settings.most:
        make_importable(settings.folder)
        serve(worker, rank, JaxRunner(devices), settings.patience)


class JaxRunner(CallRunner):
    """The prepared calls of all ranks."""

    def __init__(self, devices: list[Any]) -> None:
        super().__init__()
        self._devices = devices

    def build(self, request: Request, oracle: Oracle, inputs: GlobalArrays) -> Prepared:
        case, plan, ring = request.case, request.case.plan(request.ranks), {"axis_name": "seq"}
        function = request.build(Call(case, plan, request.user, ring_attn_jax, ring, _bind, ring | {"rngs": nnx.Rngs(0)}))
        mesh = Mesh(np.array(self._devices[: request.ranks]), ("seq",), axis_types=(AxisType.Auto,))
        spec = lambda name: SEQ if name in oracle.sharded else WHOLE

        def place(name: str, x: np.ndarray, pad: Any) -> jax.Array:
            whole = np.concatenate(cut(x, plan, pad), 1) if name in oracle.sharded else x
            return jax.device_put(jnp.asarray(whole, case.dtype if name in CAST else None), NamedSharding(mesh, spec(name)))

        def compute_shards(leaves: Arrays, others: Arrays) -> tuple[Arrays, Arrays]:
            results = function({**leaves, **others})
            sharded = {name: x for name, x in results.items() if name in oracle.sharded}
            return sharded, {name: x for name, x in results.items() if name not in sharded}

        with jax.enable_x64(case.dtype == "float64"):
            loaded = leaves, arrays, _ = load(inputs, oracle.paddings, None, place)
            specs = tuple({name: spec(name) for name in group} for group in (leaves, arrays))
            vma = getattr(function, "check_vma", True)
            mapped = jax.shard_map(compute_shards, mesh=mesh, in_specs=specs, out_specs=(SEQ, WHOLE), check_vma=vma)

            @jax.jit
            def program(leaves: Any, others: Any, cotangents: Any) -> dict[str, jax.Array]:
                results, backward = jax.vjp(lambda leaves: mapped(leaves, others), leaves)
                start = lambda n, x: cotangents[n].astype(x.dtype) if n in cotangents else jnp.zeros_like(x)
                (gradients,) = backward(tuple({n: start(n, x) for n, x in group.items()} for group in results))
                return {**results[0], **results[1], **{"d" + name: x for name, x in gradients.items()}}

        def run(loaded: Loaded = loaded) -> dict[str, jax.Array]:
            with jax.enable_x64(case.dtype == "float64"):
                return jax.block_until_ready(program(*loaded))

        def outcome(change: Change | None) -> Outcome:
            with jax.enable_x64(case.dtype == "float64"):
                changed = load(inputs, oracle.paddings, change, place) if change else loaded
                results = {name: _numpy(x) for name, x in run(changed).items()}
            shards = {name: np.split(x, plan.ranks, 1) if name in oracle.sharded else [x] for name, x in results.items()}
            return Outcome(shards, frozenset({*inputs.cotangents} & {*results}))

        return Prepared(run, outcome)

    def memory(self, request: Request) -> int | None:
        """Return the peak bytes of one run above those held before; on GPUs, of the process so far, summed over devices."""
        if self._devices[0].platform == "cpu":
            return super().memory(request)
        self.run(request)
        return sum(int((device.memory_stats() or {}).get("peak_bytes_in_use", 0)) for device in self._devices[: request.ranks])

    def forget(self, request: Request) -> None:
        super().forget(request)
        jax.clear_caches()


WEIGHTS = {"kernel": "weight", "embedding": "weight", "scale": "weight"}
"""Flax's names of weights, and PyTorch's names for them; a flax kernel is PyTorch's weight transposed."""


def _bind(module: Any, arrays: Arrays) -> tuple[Any, Arrays]:
    """Return a copy of ``module`` with its weights from ``arrays``, and the other arrays."""
    graph, state = nnx.split(module, nnx.Param)
    others, flat = dict(arrays), []
    for path, p in nnx.to_flat_state(state):
        weight = others.pop(".".join(map(str, (*path[:-1], WEIGHTS.get(str(path[-1]), path[-1])))))
        flat.append((path, p.replace(weight.T if path[-1] == "kernel" else weight)))
    return nnx.merge(graph, nnx.from_flat_state(flat)), others


def _numpy(x: jax.Array) -> np.ndarray:
    array = np.asarray(x)
    return array if array.dtype == np.float64 else array.astype(np.float32)
