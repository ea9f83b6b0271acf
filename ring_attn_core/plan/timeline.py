"""An event model of one rank: its host, its GPU and its queue of transfers, each of which does one thing after the other.

All ranks run one program, and a step takes as long as on its slowest rank, so one rank stands for all. The host starts launches
and transfers ahead of time. A transfer begins when the GPU has ended all launches before it and the queue all transfers before
it. A launch that needs what arrives waits for it: what is computed meanwhile hides the transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Machine


@dataclass
class Timeline:
    """The seconds from the start of a call at which the host, the GPU and the transfers are free. A model; nothing is measured.

    ``ranks``: ranks of a host that send at once. ``host_step``: the host's time for a step of the pass.
    """

    machine: Machine
    ranks: int
    host_step: float
    host: float = 0.0
    gpu: float = 0.0
    queue: float = 0.0

    def compute(self, seconds: float) -> None:
        """Launch the kernels of a step."""
        self.host += self.host_step
        self.gpu = max(self.gpu, self.host) + seconds

    def copy(self, size: float, launches: int = 1) -> None:
        """Move ``size`` bytes within the memory of the GPU, by some launches."""
        self.host += launches * self.machine.host_copy
        self.gpu = max(self.gpu, self.host) + size / self.machine.copies

    def send(self, size: float, crosses: bool = False) -> float:
        """Send ``size`` bytes to another rank, or to one of another host, and return the time of arrival."""
        rate = self.machine.network if crosses else self.machine.link(self.ranks)
        return self._transfer(size / rate, crosses)

    def collect(self, inside: float, across: float = 0.0) -> float:
        """Receive ``inside`` bytes from ranks of this host, and ``across`` bytes of others, by one collective."""
        seconds = max(inside / self.machine.collective, across / self.machine.network)
        return self._transfer(seconds, across > 0)

    def _transfer(self, seconds: float, crosses: bool) -> float:
        self.host += self.machine.host_send
        latency = self.machine.network_latency if crosses else self.machine.latency
        self.queue = max(self.queue, self.gpu, self.host) + latency + seconds
        return self.queue

    def wait(self, arrival: float | None) -> None:
        """Let the GPU wait for a transfer; None: for nothing."""
        if arrival is not None:
            self.gpu = max(self.gpu, arrival)

    @property
    def end(self) -> float:
        """Return the seconds of the call."""
        return max(self.gpu, self.host)
