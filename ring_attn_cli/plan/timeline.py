"""An event model of one rank: its host, its GPU and its queue of transfers. Each of the three does one thing at a time.

All ranks run the same program, and each step takes as long as on its slowest rank, so the model needs only one rank. The host
starts launches and transfers ahead of time. A transfer begins when all earlier launches on the GPU and all earlier transfers in
the queue have ended. A launch that needs a transfer waits until the transfer ends. A launch that overlaps a transfer takes longer
by ``Machine.contention`` times the overlap. Copies between GPUs by the copy engine have a queue of their own and do not slow
launches.
"""

from __future__ import annotations

from dataclasses import dataclass

from .gpus import Machine


@dataclass
class Timeline:
    """The seconds from the start of a call at which ``host``, ``gpu``, ``queue`` (of transfers) and copy ``engine`` become free.
    ``ranks``: ranks of a host that send at once. ``host_step``: the host's time to start a step."""

    machine: Machine
    ranks: int
    host_step: float
    host: float = 0.0
    gpu: float = 0.0
    queue: float = 0.0
    engine: float = 0.0

    def compute(self, seconds: float) -> None:
        """Add the kernels of a step, which take ``seconds`` on the GPU."""
        self.host += self.host_step
        start = max(self.gpu, self.host)
        self.gpu = start + seconds + self.machine.contention * max(min(self.queue - start, seconds), 0.0)

    def copy(self, size: float, launches: int = 1) -> None:
        """Add a copy of ``size`` bytes within the GPU's memory, in ``launches`` launches."""
        self.host += launches * self.machine.host_copy
        self.gpu = max(self.gpu, self.host) + size / self.machine.copies

    def send(self, size: float, crosses: bool = False) -> float:
        """Add a transfer of ``size`` bytes to another rank (on another host if ``crosses``), and return its time of arrival."""
        rate = self.machine.network if crosses else self.machine.link(self.ranks)
        return self._transfer(size / rate, crosses)

    def collect(self, inside: float, across: float = 0.0) -> float:
        """Add a collective of ``inside`` bytes from this host and ``across`` bytes from others; return its end."""
        seconds = max(inside / self.machine.collective, across / self.machine.network)
        return self._transfer(seconds, across > 0)

    def peer_copy(self, size: float) -> float:
        """Add a copy by the copy engine, started within ``host_step``; return its end."""
        self.engine = max(self.engine, self.gpu, self.host) + self.machine.peer_latency + size / self.machine.peer
        return self.engine

    def _transfer(self, seconds: float, crosses: bool) -> float:
        self.host += self.machine.host_send
        latency = self.machine.network_latency if crosses else self.machine.latency
        self.queue = max(self.queue, self.gpu, self.host) + latency + seconds
        return self.queue

    def wait(self, arrival: float | None) -> None:
        """Make the GPU wait until ``arrival``, the end of a transfer; do nothing if it is None."""
        if arrival is not None:
            self.gpu = max(self.gpu, arrival)

    @property
    def end(self) -> float:
        return max(self.gpu, self.host)
