"""The JAX side of a comparison: one process in which each rank is a device. Only processes that run JAX import this module."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ring_attn_core.plan.ring import RingPlan

from ..processes import Parent
from .cases import Case
from .measure import ResidentMemory
from .oracles import ORACLES, GlobalArrays
from .orders import Order, Outcome, WorkerSettings, cut, importable, resolve, serve

SEQ, WHOLE = PartitionSpec(None, "seq"), PartitionSpec()
CAST = {"q", "k", "v", "x"}
"""Arrays that are cast to the case's dtype; all others, such as weights, keep the dtype that they are drawn in."""


class JaxCall(NamedTuple):
    """Inputs for building a variant's function, which runs inside a shard_map over the mesh axis ``axis_name``.
    ``user``: a user's own function as ``module:function``, or None."""

    case: Case
    plan: RingPlan
    axis_name: str
    user: str | None


def work(parent: Parent, rank: int, settings: WorkerSettings) -> None:
    """Report this process's devices, then execute each ``Order`` for all ranks; stop after the report if GPUs are too few."""
    if settings.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", settings.most)
        devices = jax.devices()
        parent("ready", (rank, {"devices": len(devices), "kind": "cpu"}))
    else:
        jax.config.update("jax_pjrt_client_create_options", {"preallocate": False})  # PyTorch's processes share these GPUs
        jax.config.update("jax_default_matmul_precision", "highest")  # by default XLA rounds float32 factors to tf32 on GPUs
        devices = jax.devices() if jax.default_backend() == "gpu" else []
        parent("ready", (rank, {"devices": len(devices), "kind": devices[0].device_kind if devices else "none"}))
        if len(devices) < settings.most:
            return
    importable(settings.folder)
    serve(parent, rank, JaxWorker(devices), settings.patience)


class JaxWorker:
    """An executor of orders for all ranks. ``prepare`` compiles and runs a call; the other methods act on it."""

    def __init__(self, devices: list[Any]) -> None:
        self._devices = devices
        self._known: dict[Any, Callable[[], dict[str, jax.Array]]] = {}

    def prepare(self, order: Order, inputs: GlobalArrays | None = None) -> Outcome:
        """Compile the call, run it once, and return results and gradients of all ranks. The oracle draws missing ``inputs``."""
        oracle, case, plan = ORACLES[order.oracle], order.case, order.case.plan(order.ranks)
        inputs = inputs or oracle.inputs(case)
        function = resolve(order.call)(JaxCall(case, plan, "seq", order.user))
        mesh = Mesh(np.array(self._devices[: order.ranks]), ("seq",), axis_types=(AxisType.Auto,))
        spec = lambda name: SEQ if name in oracle.sharded else WHOLE

        def there(name: str, x: np.ndarray, pad: Any = 0) -> jax.Array:
            whole = np.concatenate(cut(x, plan, pad), 1) if name in oracle.sharded else x
            return jax.device_put(jnp.asarray(whole, case.dtype if name in CAST else None), NamedSharding(mesh, spec(name)))

        def on_shards(leaves: dict[str, Any], others: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
            results = function({**leaves, **others})
            sharded = {name: x for name, x in results.items() if name in oracle.sharded}
            return sharded, {name: x for name, x in results.items() if name not in sharded}

        with jax.enable_x64(case.dtype == "float64"):
            arrays = {name: there(name, x, oracle.paddings.get(name, 0)) for name, x in inputs.arrays.items()}
            leaves = {name: arrays.pop(name) for name in inputs.leaves}
            cotangents = {name: there(name, x) for name, x in inputs.cotangents.items()}
            specs = tuple({name: spec(name) for name in group} for group in (leaves, arrays))
            vma = getattr(function, "check_vma", True)
            mapped = jax.shard_map(on_shards, mesh=mesh, in_specs=specs, out_specs=(SEQ, WHOLE), check_vma=vma)

            @jax.jit
            def program(leaves: Any, others: Any, cotangents: Any) -> dict[str, jax.Array]:
                (sharded, whole), backward = jax.vjp(lambda leaves: mapped(leaves, others), leaves)
                start = lambda of: {
                    n: cotangents[n].astype(x.dtype) if n in cotangents else jnp.zeros_like(x) for n, x in of.items()
                }
                (gradients,) = backward((start(sharded), start(whole)))
                return {**sharded, **whole, **{"d" + name: x for name, x in gradients.items()}}

        def run() -> dict[str, jax.Array]:
            with jax.enable_x64(case.dtype == "float64"):
                return jax.block_until_ready(program(leaves, arrays, cotangents))

        self._known[order.key] = run
        results = run()
        cut_up = lambda name, x: np.split(x, plan.ranks, 1) if name in oracle.sharded else [x]
        shards = {name: cut_up(name, _numpy(x)) for name, x in results.items()}
        return Outcome(shards, frozenset(name for name in cotangents if name in results))

    def time(self, order: Order) -> float:
        """Return the seconds of one run of the compiled program, forward and backward."""
        began = time.perf_counter()
        self._known[order.key]()
        return time.perf_counter() - began

    def memory(self, order: Order) -> int | None:
        """Return the peak bytes of one run above those held before; on GPUs, of the process so far, summed over devices."""
        if self._devices[0].platform != "cpu":
            self._known[order.key]()
            return sum(int((device.memory_stats() or {}).get("peak_bytes_in_use", 0)) for device in self._devices[: order.ranks])
        memory = ResidentMemory()
        self._known[order.key]()
        return memory.peak()

    def forget(self, order: Order) -> None:
        self._known.pop(order.key, None)
        jax.clear_caches()


def _numpy(x: jax.Array) -> np.ndarray:
    array = np.asarray(x)
    return array if array.dtype == np.float64 else array.astype(np.float32)
