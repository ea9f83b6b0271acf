"""The times of each rank (``Timings``), and the cost model's ``Machine`` record made of them. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ring_attn_core.plan.machine import NOISE, Machine, slowest

Points = tuple[tuple[float, float], ...]
"""Pairs (size, seconds); the size is a number of tokens or of bytes."""

FITTED, NARROW = 128, 64
"""The head dim for which a record has rates, and a smaller head dim whose rates are only printed."""


class MeasuredSizes(NamedTuple):
    """The sizes to measure: ``tokens`` in a sequence, ``bytes`` in a transfer, bytes read and written by a copy (``copied``)."""

    tokens: tuple[int, ...]
    heads: int
    bytes: tuple[int, ...]
    copied: int
    dtype: str


OF_GPU = MeasuredSizes((4096, 16384), 16, (2**20, 2**23, 2**26), 2**28, "bfloat16")
OF_CPU = MeasuredSizes((256, 1024), 2, (2**16, 2**20, 2**22), 2**24, "float32")
IN_FLIGHT = 8
"""Number of consecutive transfers that are timed together."""


@dataclass(frozen=True, kw_only=True)
class Timings:
    """The times of one rank, in seconds.

    ``forward``, ``backward``: for each head dim, points (tokens, seconds) of full attention with ``heads`` heads. ``link``,
    ``collective``, ``copy``: points (bytes, seconds). The bytes are those that each rank sends to the next while all ranks send
    (``link``), that a rank receives in an all-gather (``collective``), or that a copy reads and writes (``copy``). ``host_...``:
    the host's seconds to launch a forward, backward, send or copy; 0 on a CPU, and in JAX 0 for a send or copy. ``memory``: the
    rank's memory in bytes. ``noise``: the greatest relative difference between repeated measurements.

    ``contention``: the extra time of attention during a send, divided by the time of the send. ``peer``: points (bytes, seconds)
    of copies by the copy engine from the next rank's memory, while all ranks copy; empty if they were not measured. ``no_peer``:
    the reason if GPUs cannot share memory. ``host_pull``, ``host_push``: (forward, backward), the host's seconds for one step of
    the strategy "pull" or "push".
    """

    device: str
    memory: float
    heads: int
    forward: dict[int, Points]
    backward: dict[int, Points]
    link: Points
    collective: Points
    copy: Points
    host_forward: float
    host_backward: float
    host_send: float
    host_copy: float
    noise: float
    contention: float = 0.0
    peer: Points = ()
    no_peer: str = ""
    host_pull: tuple[float, float] = (0.0, 0.0)
    host_push: tuple[float, float] = (0.0, 0.0)

    def of_token(self, dim: int, backward: bool) -> tuple[float, float]:
        """Return the seconds of attention for one query in one head: (constant seconds, additional seconds per visible key)."""
        points = (self.backward if backward else self.forward)[dim]
        return line([(tokens, seconds / tokens / self.heads) for tokens, seconds in points])

    def misfit(self, dim: int, backward: bool) -> float:
        """Return the largest relative difference between a measured time of attention and the line of :meth:`of_token`.
        With two times it is 0 (except for rounding) if their line has a positive slope and an intercept of at least 0."""
        constant, of_key = self.of_token(dim, backward)
        times = (self.backward if backward else self.forward)[dim]
        return max(abs((constant + of_key * n) * n * self.heads / seconds - 1) for n, seconds in times)

    def rate(self, dim: int, backward: bool) -> float:
        """Return the FLOP/s of attention on long shards. A query-key pair takes 4 ``dim`` FLOPs forward, 10 ``dim`` backward."""
        return (10 if backward else 4) * dim / self.of_token(dim, backward)[1]


def warning(machine: Machine) -> str | None:
    """Return a warning if the measurements of a record differ by more than ``NOISE``. Otherwise return None."""
    if machine.noise <= NOISE:
        return None
    return (
        f"warning: repeats of a measurement still differ by {machine.noise:.0%}, more than {NOISE:.0%}, so other programs seem "
        'to use this machine. The record says so, and strategy="auto" takes the ring with it: stop the other programs and run '
        "ring-attn doctor --measure again, or name a strategy"
    )


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit (size, seconds) by least squares of the relative error, and return intercept (at least 0) and slope.
    If the time does not grow with the size, as on a busy machine, use only the largest size."""
    weights = [1 / seconds**2 for _, seconds in points]
    mean = lambda values: sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
    x, y = mean([size for size, _ in points]), mean([seconds for _, seconds in points])
    slope = mean([(size - x) * (seconds - y) for size, seconds in points]) / mean([(size - x) ** 2 for size, _ in points])
    if slope > 0 and y >= slope * x:
        return y - slope * x, slope
    if slope > 0:
        return 0.0, mean([size * seconds for size, seconds in points]) / mean([size**2 for size, _ in points])
    size, seconds = max(points)
    return 0.0, seconds / size


def record(timings: Sequence[Timings], network: float) -> Machine:
    """Return a machine's record, each number the worst of any rank.
    ``network``: bytes per second to another host. ``forward_state`` comes from the speed of copies: seconds to read and write a
    query's float32 output and log-sum-exp in one head."""
    for each in timings:
        series = (*each.forward.values(), *each.backward.values(), each.link, each.collective, each.copy, each.peer)
        if not all(seconds > 0 for points in series for _, seconds in points):
            raise ValueError("a measured time is not above 0, so nothing was saved: run ring-attn doctor --measure again")
    return slowest([_of_rank(each, len(timings), network) for each in timings])


def _of_rank(each: Timings, ranks: int, network: float) -> Machine:
    forward_step, _ = each.of_token(FITTED, False)
    backward_step, _ = each.of_token(FITTED, True)
    latency, of_byte = line(each.link)
    copies = 1 / line(each.copy)[1]
    peer_latency, of_peer_byte = line(each.peer) if each.peer else (0.0, 0.0)
    return Machine(
        name=each.device,
        forward_rate=each.rate(FITTED, False),
        backward_rate=each.rate(FITTED, True),
        forward_step=forward_step,
        forward_state=2 * 4 * (FITTED + 1) / copies,
        backward_step=backward_step,
        links=((ranks, 1 / of_byte),),
        collective=1 / line(each.collective)[1],
        network=network,
        latency=latency,
        network_latency=latency,
        host_forward=each.host_forward,
        host_backward=each.host_backward,
        host_send=each.host_send,
        host_copy=each.host_copy,
        copies=copies,
        memory=each.memory,
        noise=max(each.noise, each.misfit(FITTED, False), each.misfit(FITTED, True)),
        contention=each.contention,
        peer=1 / of_peer_byte if each.peer else 0.0,
        peer_latency=peer_latency,
        host_pull_forward=each.host_pull[0],
        host_pull_backward=each.host_pull[1],
        host_push_forward=each.host_push[0],
        host_push_backward=each.host_push[1],
    )
