"""Timings of one rank in PyTorch, in a process of its own."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ring_attn_core.masks import full
from ring_attn_core.problem.strategies import PEERS
from ring_attn_torch import ring_attention
from ring_attn_torch.attend.keys import Keys
from ring_attn_torch.ring.agreement import same_error
from ring_attn_torch.ring.peers import FLAG_BYTES, copy, free, peers_of
from ring_attn_torch.ring.transfer import send

from ..processes import Report
from ..train.torch_ranks import CPU, device_of, member
from .repeats import REPEATS, SPARE, Repeats
from .timings import FITTED, IN_FLIGHT, NARROW, OF_CPU, OF_GPU, MeasuredSizes, Points, Timings

BURST = 2
"""Number of consecutive runs on a GPU that are timed together."""
AHEAD, LARGE = 0.02, 4096
"""Seconds for which a GPU is busy before the timed runs, and the size of the square matrices whose products keep it busy."""
LAUNCHES = 20
"""Number of calls whose launches are timed together on the host."""
SHORT = 128
"""Tokens of a rank in calls whose launches are timed."""


def work(report: Report, rank: int, ranks: int, gpus: bool, store: str, patience: float) -> None:
    """Measure attention and copies while all ranks do, then transfers, and report this rank's ``Timings``.
    ``store``: file by which the ranks meet. ``patience``: timeout of the process group in seconds."""
    device = device_of(rank, ranks) if gpus else CPU
    if device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    clock, sizes = Clock(device), OF_GPU if device.type == "cuda" else OF_CPU
    found = attention(clock, sizes) | copies(clock, sizes)
    with member(device, rank, ranks, store, patience):
        clock.together()
        found |= transfers(clock, sizes, ranks)
        if device.type == "cuda":
            found |= contention(clock, sizes, found["link"][-1]) | peer_copies(clock, sizes, dist.group.WORLD)
    name, memory = "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    report("timings", Timings(device=name, memory=memory, heads=sizes.heads, noise=clock.repeats.noise, **found))


class Clock:
    """A timer of runs on a device.
    On a GPU, by CUDA events: large matrix products and an untimed run keep it busy while the host launches the timed runs, so
    that launches do not count; :meth:`host` measures them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.repeats = device, Repeats(SPARE if device.type == "cuda" else 0.0)
        if device.type == "cuda":
            self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.large, self.product = (torch.zeros(LARGE, LARGE, device=device) for _ in range(2))
            self.products = 1
            self._occupy()
            self.products = max(1, math.ceil(AHEAD / self._between(self._occupy)))

    def seconds(self, *runs: Callable[[], object]) -> list[float]:
        """Return the median seconds of each run, measured by :meth:`Repeats.seconds`, which interleaves the runs."""
        return self.repeats.seconds([partial(self._once, run) for run in runs])

    def host(self, run: Callable[[], object]) -> float:
        """Return the seconds that the host takes to launch a run, a median of ``REPEATS`` measurements; 0 on a CPU."""
        if self.device.type == "cpu":
            return 0.0
        return median([self._launched(run) for _ in range(REPEATS + 1)][1:])

    def together(self) -> None:
        """Let all ranks of the default process group repeat every later warm-up or measurement that any of them must repeat."""
        self.repeats.on_any_rank = self._on_any_rank

    def _on_any_rank(self, flag: bool) -> bool:
        found = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found.item())

    def _launched(self, run: Callable[[], object]) -> float:
        self._wait()
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            run()
        taken = time.perf_counter() - began
        self._wait()
        return taken / LAUNCHES

    def _once(self, run: Callable[[], object]) -> float:
        if self.device.type == "cpu":
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        self._wait()
        self._occupy()
        run()
        return self._between(lambda: [run() for _ in range(BURST)]) / BURST

    def _occupy(self) -> None:
        for _ in range(self.products):
            torch.mm(self.large, self.large, out=self.product)

    def _between(self, run: Callable[[], object]) -> float:
        """Return the seconds that the GPU takes for the work that ``run`` launches."""
        self.begin.record()
        run()
        self.end.record()
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def attention(clock: Clock, sizes: MeasuredSizes) -> dict[str, Any]:
    """Measure attention on one rank. Return ``forward``, ``backward``, ``host_forward`` and ``host_backward`` of ``Timings``."""
    forward: dict[int, Points] = {}
    backward: dict[int, Points] = {}
    for dim in (NARROW, FITTED):
        calls = {tokens: _passes(clock, sizes, tokens, dim) for tokens in sizes.tokens}
        for times, turn in ((forward, 0), (backward, 1)):
            seconds = clock.seconds(*(call[turn] for call in calls.values()))
            times[dim] = tuple((float(tokens), each) for tokens, each in zip(calls, seconds, strict=True))
    short = _passes(clock, sizes, SHORT, FITTED)
    host = {"host_forward": clock.host(short[0]), "host_backward": clock.host(short[1])}
    return {"forward": forward, "backward": backward} | host


def _passes(
    clock: Clock, sizes: MeasuredSizes, tokens: int, dim: int, group: Any = None, strategy: str = "ring"
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that run a forward and a backward of full attention on the ring ``group``, with ``tokens`` per rank.
    ``group=None`` means one rank; pass it only before this process joins a process group."""
    shape, dtype = (1, tokens, sizes.heads, dim), getattr(torch, sizes.dtype)
    q, k, v, dout = (torch.randn(shape, device=clock.device, dtype=dtype) for _ in range(4))
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    run = lambda: ring_attention(*inputs, layout="contiguous", mask=full(), group=group, strategy=strategy)
    out = run()
    return run, lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)  # type: ignore[arg-type]


def copies(clock: Clock, sizes: MeasuredSizes) -> dict[str, Any]:
    """Measure copies in memory. Return the fields ``copy`` and ``host_copy`` of ``Timings``."""
    moved, short = (sizes.copied // 4, sizes.copied), torch.zeros(128, device=clock.device)
    sources = [torch.zeros(size // 2, dtype=torch.uint8, device=clock.device) for size in moved]
    taken = clock.seconds(*(partial(torch.empty_like(source).copy_, source) for source in sources))
    return {"copy": tuple(zip(map(float, moved), taken, strict=True)), "host_copy": clock.host(short.clone)}


def transfers(clock: Clock, sizes: MeasuredSizes, ranks: int) -> dict[str, Any]:
    """Measure all-gathers and sends to the next rank. Return ``link``, ``collective`` and ``host_send`` of ``Timings``."""
    group = dist.group.WORLD
    found: dict[str, Any] = {"link": (), "collective": ()}
    for size in sizes.bytes:
        x = torch.zeros(size, dtype=torch.uint8, device=clock.device)
        every = torch.empty(size * ranks, dtype=torch.uint8, device=clock.device)
        hops, gathers = clock.seconds(
            lambda x=x: [hop(x, group) for _ in range(IN_FLIGHT)],
            lambda x=x, every=every: [dist.all_gather_into_tensor(every, x) for _ in range(IN_FLIGHT)],
        )
        found["link"] += ((float(size), hops / IN_FLIGHT),)
        found["collective"] += ((float(size * (ranks - 1)), gathers / IN_FLIGHT),)
    short = torch.zeros(sizes.bytes[0], dtype=torch.uint8, device=clock.device)
    return found | {"host_send": clock.host(lambda: hop(short, group))}


def hop(x: torch.Tensor, group: Any) -> None:
    """Send a tensor to the next rank and wait for the tensor from the previous rank."""
    send((x,), 1, group).wait()


def contention(clock: Clock, sizes: MeasuredSizes, hop_alone: tuple[float, float]) -> dict[str, Any]:
    """Measure ``contention`` of ``Timings`` during sends. ``hop_alone``: bytes and seconds of a send without attention."""
    size, seconds = hop_alone
    group, x = dist.group.WORLD, torch.zeros(int(size), dtype=torch.uint8, device=clock.device)
    alone: Any = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    attend, _ = _passes(clock, sizes, sizes.tokens[-1], FITTED, group=alone)

    def beside() -> None:
        for _ in range(IN_FLIGHT):
            hop = send((x,), 1, group)
            attend()
            hop.wait()

    crowded, free = clock.seconds(beside, lambda: [attend() for _ in range(IN_FLIGHT)])
    return {"contention": max(crowded - free, 0.0) / IN_FLIGHT / seconds}


def peer_copies(clock: Clock, sizes: MeasuredSizes, group: Any) -> dict[str, Any]:
    """Measure ``peer``, ``host_pull`` and ``host_push`` of ``Timings``; return only ``no_peer`` if GPUs cannot share memory."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    there = Keys(torch.zeros(sizes.bytes[-1], dtype=torch.uint8, device=clock.device))
    try:
        with same_error(group):
            buffers = peers_of(group, "push", there, torch.uint8)
    except (ValueError, RuntimeError) as error:
        return {"no_peer": str(error).partition("\n")[0]}
    found: dict[str, Any] = {"peer": ()}
    for size in sizes.bytes:
        here, source = there.kv[:size], buffers.bytes_of((rank + 1) % ranks, FLAG_BYTES, size)
        (taken,) = clock.seconds(lambda here=here, source=source: [copy([here], [source]) for _ in range(IN_FLIGHT)])
        found["peer"] += ((float(size), taken / IN_FLIGHT),)
    for strategy in PEERS:
        calls = _passes(clock, sizes, SHORT, FITTED, group=group, strategy=strategy)
        found[f"host_{strategy}"] = tuple(clock.host(call) / ranks for call in calls)
        free(group, strategy)
    return found
