"""Timings of all ranks in JAX: the ranks are devices of one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ring_attn_core.masks import full
from ring_attn_jax import sharded_ring_attention

from ..processes import Report
from .repeats import REPEATS, SPARE, Repeats
from .timings import FITTED, IN_FLIGHT, NARROW, OF_CPU, OF_GPU, MeasuredSizes, Points, Timings

BURST = 4
"""Number of consecutive runs on a GPU that are timed together."""
LAUNCHES = 20
"""Number of calls whose launches are timed together on the host."""


def work(report: Report, ranks: int, gpus: bool) -> None:
    """Measure attention, copies, and transfers between ``ranks`` devices; report the same ``Timings`` once for each rank."""
    if not gpus:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", ranks)
    devices, sizes = jax.devices()[:ranks], OF_GPU if gpus else OF_CPU
    if len(devices) < ranks or (gpus and devices[0].platform != "gpu"):
        report("mistake", f"JAX sees {len(devices)} devices of {devices[0].platform}, not {ranks} GPUs")
        return
    clock = JaxClock(gpus)
    found = attention(clock, devices[0], sizes) | copies(clock, sizes) | transfers(clock, devices, sizes)
    memory = (devices[0].memory_stats() or {}).get("bytes_limit") if gpus else None
    if memory is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    name = devices[0].device_kind if gpus else "cpu"
    timings = Timings(device=name, memory=memory, heads=sizes.heads, noise=clock.repeats.noise, **found)
    for _ in range(ranks):
        report("timings", timings)


class JaxClock:
    """A timer of runs on JAX's devices. ``gpus``: True if the devices are GPUs."""

    def __init__(self, gpus: bool) -> None:
        self.gpus, self.repeats = gpus, Repeats(SPARE if gpus else 0.0)

    def seconds(self, *runs: Callable[[], Any]) -> list[float]:
        """Return the median seconds of each run, measured by :meth:`Repeats.seconds`, which interleaves the runs."""
        return self.repeats.seconds([partial(self._once, run) for run in runs])

    def host(self, run: Callable[[], Any]) -> float:
        """Return the seconds that the host takes to launch a run, a median of ``REPEATS`` measurements; 0 on a CPU."""
        if not self.gpus:
            return 0.0
        return median([self._launched(run) for _ in range(REPEATS + 1)][1:])

    def _launched(self, run: Callable[[], Any]) -> float:
        began = time.perf_counter()
        results = [run() for _ in range(LAUNCHES)]
        taken = time.perf_counter() - began
        jax.block_until_ready(results)
        return taken / LAUNCHES

    def _once(self, run: Callable[[], Any]) -> float:
        """Return the seconds of a run.
        On a GPU, time 1 run and ``1 + BURST`` runs: in the difference / ``BURST`` the constant cost of launching and waiting
        cancels."""
        one = self._in_a_row(run, 1)
        return (self._in_a_row(run, 1 + BURST) - one) / BURST if self.gpus else one

    def _in_a_row(self, run: Callable[[], Any], number: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready([run() for _ in range(number)])
        return time.perf_counter() - began


def attention(clock: JaxClock, device: Any, sizes: MeasuredSizes) -> dict[str, Any]:
    """Measure ``forward``, ``backward``, ``host_forward`` and ``host_backward`` of ``Timings`` on one device.
    JAX runs the backward only with a forward: its time is the rest of both passes, but at least the forward's. ``host_backward``
    is the time to launch both."""
    mesh = Mesh(np.array([device]), ("seq",))
    run = lambda q, k, v: sharded_ring_attention(q, k, v, mesh=mesh, layout="contiguous", mask=full())
    forward = jax.jit(run)
    both = jax.jit(lambda q, k, v, dout: jax.vjp(run, q, k, v)[1](dout))
    inputs = lambda tokens, dim: [
        jax.random.normal(key, (1, tokens, sizes.heads, dim), sizes.dtype) for key in jax.random.split(jax.random.key(0), 4)
    ]
    found: dict[str, dict[int, Points]] = {"forward": {}, "backward": {}}
    for dim in (NARROW, FITTED):
        arrays = [inputs(tokens, dim) for tokens in sizes.tokens]
        runs = [(partial(forward, *each[:3]), partial(both, *each)) for each in arrays]
        taken = clock.seconds(*(run for pair in runs for run in pair))
        pairs = zip(sizes.tokens, taken[::2], taken[1::2], strict=True)
        points = [(tokens, once, max(twice - once, once)) for tokens, once, twice in pairs]
        found["forward"][dim] = tuple((tokens, once) for tokens, once, _ in points)
        found["backward"][dim] = tuple((tokens, more) for tokens, _, more in points)
    q, k, v, dout = inputs(128, FITTED)
    launches = {"host_forward": clock.host(lambda: forward(q, k, v)), "host_backward": clock.host(lambda: both(q, k, v, dout))}
    return found | launches


def copies(clock: JaxClock, sizes: MeasuredSizes) -> dict[str, Any]:
    """Measure ``copy`` of ``Timings``; ``host_copy`` is 0: the host launches no copies inside a compiled program."""
    copy = jax.jit(lambda x: x + jnp.uint8(1))
    moved = (sizes.copied // 4, sizes.copied)
    taken = clock.seconds(*(partial(copy, jnp.zeros(size // 2, jnp.uint8)) for size in moved))
    return {"copy": tuple(zip(map(float, moved), taken, strict=True)), "host_copy": 0.0}


def transfers(clock: JaxClock, devices: list[Any], sizes: MeasuredSizes) -> dict[str, Any]:
    """Measure all-gathers and sends to the next device. Return ``link``, ``collective`` and ``host_send`` of ``Timings``."""
    ranks = len(devices)
    mesh = Mesh(np.array(devices), ("seq",))
    onward = [(rank, (rank + 1) % ranks) for rank in range(ranks)]

    def hops(x: jax.Array) -> jax.Array:
        for _ in range(IN_FLIGHT):
            x = lax.ppermute(x, "seq", onward)
        return x

    def gathers(x: jax.Array) -> jax.Array:
        for _ in range(IN_FLIGHT):
            every = lax.all_gather(x, "seq", tiled=True)
            x = lax.dynamic_slice_in_dim(every, lax.axis_index("seq"), x.shape[0])
        return x

    on_ring = lambda function: jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("seq"), out_specs=P("seq")))
    hop, gather, link, collective = on_ring(hops), on_ring(gathers), [], []
    for size in sizes.bytes:
        x = jax.device_put(jnp.zeros(size * ranks, jnp.uint8), NamedSharding(mesh, P("seq")))
        hop_time, gather_time = clock.seconds(partial(hop, x), partial(gather, x))
        link.append((float(size), hop_time / IN_FLIGHT))
        collective.append((float(size * (ranks - 1)), gather_time / IN_FLIGHT))
    return {"link": tuple(link), "collective": tuple(collective), "host_send": 0.0}
