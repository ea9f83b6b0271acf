"""The table of GPUs from which ``ring-attn plan --gpus`` predicts: their rates, latencies and host times, as measured."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The speed of one rank and of its links, in seconds and bytes.

    ``forward_rate``, ``backward_rate``: operations per second of attention on long shards, with a head dim of 128 and elements of
    2 bytes. A visible pair takes 4 operations per head and dim forward, 10 backward. ``forward_step``, ``backward_step``: time of
    a step without its matrix products, for each (query, head) pair that sees a key, with a head dim of 128. ``forward_state``:
    addition for the online-softmax state of several steps. ``links``: pairs (n, rate), by n: if n ranks of a host send at once,
    each sends and receives ``rate`` bytes per second. ``collective``: bytes per second received in an all-gather or all-to-all
    within a host. ``network``: bytes per second to another host. ``latency``, ``network_latency``: time before the first byte.
    ``host_...``: the host's time to start a step, a transfer or a copy; ``host_push_...``: a step with transfers and flags.
    ``copies``: bytes per second moved in a rank's memory. ``peer``, ``peer_latency``: the copy engine's rate from another GPU of
    the host, and its time before the first byte. ``contention``: a kernel takes longer by this fraction of its overlap with a
    transfer, because NCCL's kernels occupy multiprocessors.
    """

    name: str
    forward_rate: float
    backward_rate: float
    forward_step: float
    forward_state: float
    backward_step: float
    links: tuple[tuple[int, float], ...]
    collective: float
    network: float
    latency: float
    network_latency: float
    host_forward: float
    host_backward: float
    host_send: float
    host_copy: float
    host_push_forward: float
    host_push_backward: float
    copies: float
    memory: float
    peer: float
    peer_latency: float
    contention: float = 0.0

    def link(self, ranks: int) -> float:
        """Return a link's bytes per second for ``ranks`` sending ranks, by the next larger measured number, or the largest."""
        return next((rate for most, rate in self.links if most >= ranks), self.links[-1][1])


H200 = Machine(
    name="NVIDIA H200",
    forward_rate=640e12,
    backward_rate=511e12,
    forward_step=0.384e-9,
    forward_state=0.434e-9,
    backward_step=0.339e-9,
    links=((2, 290e9), (4, 160e9), (8, 120e9)),
    collective=390e9,
    network=45e9,
    latency=28e-6,
    network_latency=30e-6,
    host_forward=28e-6,
    host_backward=460e-6,
    host_send=16e-6,
    host_copy=34e-6,
    host_push_forward=323e-6,
    host_push_backward=532e-6,
    copies=2.5e12,
    memory=141e9,
    peer=385e9,
    peer_latency=7e-6,
)
"""An H200 in a host with two to eight GPUs on NVLink. The links of 4 and 8 ranks were measured without kernels, and so was
``peer``, on a machine with a slower host, of which the host's times under "push" are too. The forward and backward rates come
from rings without transfers and from single launches. All other fields except nominal ones are fitted to calls on two GPUs
(benchmarks/simulate). ``memory``, ``network`` and ``network_latency`` are nominal: a network of 400 Gb/s for each GPU, 9 tenths
of it data."""

H100 = replace(
    H200,
    name="NVIDIA H100",
    forward_rate=615e12,
    backward_rate=502e12,
    forward_step=0.2e-9,
    forward_state=0.18e-9,
    backward_step=0.34e-9,
    host_forward=75e-6,
    host_backward=310e-6,
    host_send=195e-6,
    host_copy=22e-6,
    host_push_forward=245e-6,
    host_push_backward=620e-6,
    copies=1.75e12,
    memory=80e9,
    peer=374e9,
    peer_latency=5e-6,
    contention=0.7,
)
"""An H100 in a host with four GPUs on NVLink, fitted to calls of 2,048 and 8,192 tokens on four GPUs (benchmarks/simulate).
``peer`` was measured without kernels; links, collectives and the network are those of the H200."""

GPUS = {"H200": H200, "H100": H100}
