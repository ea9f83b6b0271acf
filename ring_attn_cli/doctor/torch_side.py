"""Timings of one rank in PyTorch. Imported in the ranks' processes only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
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
from .timings import FITTED, IN_FLIGHT, NARROW, OF_CPU, OF_GPU, MeasuredSizes, Points, Repeats, Timings

REPEATS = 7
LAUNCHES = 20
"""Number of calls whose launches are timed together on the host."""
SHORT = 128
"""Tokens of a rank in calls whose launches are timed."""


def work(report: Report, rank: int, ranks: int, gpus: bool, store: str, patience: float) -> None:
    """Measure attention and copies on all ranks at once, then transfers between them; report them as ``Timings``."""
    device = device_of(rank, ranks) if gpus else CPU
    if device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    clock, sizes = Clock(device), OF_GPU if device.type == "cuda" else OF_CPU
    found = attention(clock, sizes) | copies(clock, sizes)
    with member(device, rank, ranks, store, patience):
        found |= transfers(clock, sizes, ranks)
        if device.type == "cuda":
            found |= contention(clock, sizes, found["link"][-1]) | peer_copies(clock, sizes, dist.group.WORLD)
    name, memory = "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    report("timings", Timings(device=name, memory=memory, heads=sizes.heads, noise=clock.repeats.noise, **found))


class Clock:
    """A timer of a device. It waits for the device's work before and after the timed run."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.repeats = device, Repeats()

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the shortest of ``REPEATS`` times of a run, because other processes may slow some of them down."""
        return self.repeats.shortest([self._once(run) for _ in range(REPEATS)])

    def host(self, run: Callable[[], object]) -> float:
        """Return the seconds that the host takes to launch a run; 0 on a CPU."""
        if self.device.type == "cpu":
            return 0.0
        run()
        self._wait()
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            run()
        taken = time.perf_counter() - began
        self._wait()
        return taken / LAUNCHES

    def _once(self, run: Callable[[], object]) -> float:
        self._wait()
        began = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def attention(clock: Clock, sizes: MeasuredSizes) -> dict[str, Any]:
    """Return the times of attention on one rank."""
    forward: dict[int, Points] = {}
    backward: dict[int, Points] = {}
    for dim in (NARROW, FITTED):
        calls = {tokens: _passes(clock, sizes, tokens, dim) for tokens in sizes.tokens}
        forward[dim] = tuple((tokens, clock.seconds(call[0])) for tokens, call in calls.items())
        backward[dim] = tuple((tokens, clock.seconds(call[1])) for tokens, call in calls.items())
    short = _passes(clock, sizes, SHORT, FITTED)
    host = {"host_forward": clock.host(short[0]), "host_backward": clock.host(short[1])}
    return {"forward": forward, "backward": backward} | host


def _passes(
    clock: Clock, sizes: MeasuredSizes, tokens: int, dim: int, group: Any = None, strategy: str = "ring"
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that run a forward and a backward of full attention.

    ``group``: None before this process joins a group: a ring of one rank.
    """
    shape, dtype = (1, tokens, sizes.heads, dim), getattr(torch, sizes.dtype)
    q, k, v, dout = (torch.randn(shape, device=clock.device, dtype=dtype) for _ in range(4))
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    run = lambda: ring_attention(*inputs, layout="contiguous", mask=full(), group=group, strategy=strategy)
    out = run()
    return run, lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)  # type: ignore[arg-type]


def copies(clock: Clock, sizes: MeasuredSizes) -> dict[str, Any]:
    """Return the times of copies in memory."""
    found, short = [], torch.zeros(128, device=clock.device)
    for size in (sizes.copied // 4, sizes.copied):
        source = torch.zeros(size // 2, dtype=torch.uint8, device=clock.device)
        copy = torch.empty_like(source)
        found.append((float(size), clock.seconds(lambda copy=copy, source=source: copy.copy_(source))))
    return {"copy": tuple(found), "host_copy": clock.host(short.clone)}


def transfers(clock: Clock, sizes: MeasuredSizes, ranks: int) -> dict[str, Any]:
    """Return the times of transfers between all ranks of the default group."""
    group, link, collective = dist.group.WORLD, [], []
    for size in sizes.bytes:
        x = torch.zeros(size, dtype=torch.uint8, device=clock.device)
        every = torch.empty(size * ranks, dtype=torch.uint8, device=clock.device)
        link.append((float(size), clock.seconds(lambda x=x: [hop(x, group) for _ in range(IN_FLIGHT)]) / IN_FLIGHT))
        received = float(size * (ranks - 1))
        taken = clock.seconds(lambda x=x, every=every: [dist.all_gather_into_tensor(every, x) for _ in range(IN_FLIGHT)])
        collective.append((received, taken / IN_FLIGHT))
    short = torch.zeros(sizes.bytes[0], dtype=torch.uint8, device=clock.device)
    host = clock.host(lambda: hop(short, group))
    return {"link": tuple(link), "collective": tuple(collective), "host_send": host}


def hop(x: torch.Tensor, group: Any) -> None:
    """Send a tensor to the next rank and wait for the tensor from the previous rank."""
    send((x,), 1, group).wait()


def contention(clock: Clock, sizes: MeasuredSizes, hop_alone: tuple[float, float]) -> dict[str, Any]:
    """Return by which share of a hop's time attention takes longer beside the hop. ``hop_alone``: bytes and seconds of a hop."""
    size, seconds = hop_alone
    group, x = dist.group.WORLD, torch.zeros(int(size), dtype=torch.uint8, device=clock.device)
    alone: Any = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    attend, _ = _passes(clock, sizes, sizes.tokens[-1], FITTED, group=alone)

    def beside() -> None:
        for _ in range(IN_FLIGHT):
            hop = send((x,), 1, group)
            attend()
            hop.wait()

    longer = clock.seconds(beside) - clock.seconds(lambda: [attend() for _ in range(IN_FLIGHT)])
    return {"contention": max(longer, 0.0) / IN_FLIGHT / seconds}


def peer_copies(clock: Clock, sizes: MeasuredSizes, group: Any) -> dict[str, Any]:
    """Return the times of copies from the next rank's memory, and of the host in a step of "pull" and "push".

    Return the reason if the GPUs do not share memory.
    """
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
        taken = clock.seconds(lambda here=here, source=source: [copy([here], [source]) for _ in range(IN_FLIGHT)])
        found["peer"] += ((float(size), taken / IN_FLIGHT),)
    for strategy in PEERS:
        calls = _passes(clock, sizes, SHORT, FITTED, group=group, strategy=strategy)
        found[f"host_{strategy}"] = tuple(clock.host(call) / ranks for call in calls)
        free(group, strategy)
    return found
