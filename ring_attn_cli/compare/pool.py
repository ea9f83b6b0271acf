"""The processes of both frameworks, started once for all cases: one for JAX, and one for each rank of PyTorch."""

from __future__ import annotations

import time
from typing import Any

from ..processes import Crews, Failure, Message
from .orders import Order, Outcome, WorkerSettings, here, where_at
from .variants import TITLES

GRACE = 1.0
"""Seconds to wait for the other ranks' errors after the first rank has reported one."""


START = 120.0
"""Least timeout, in seconds, for processes to start and import their frameworks."""


class VariantError(ValueError):
    """An error of a variant's function. If ``everywhere``, all ranks raised the same error, and the processes stay usable."""

    def __init__(self, text: str, everywhere: bool) -> None:
        super().__init__(text)
        self.everywhere = everywhere


class Pool:
    """A context manager that starts the worker processes of each framework and ends them on exit.
    Its methods send an :class:`Order` about one call, a variant's function applied to a case. ``kinds``: by framework, "cpu" or
    the name of a GPU."""

    def __init__(self, frameworks: tuple[str, ...], rings: tuple[int, ...], device: str, patience: float) -> None:
        self._patience = patience
        self._crews = Crews(patience)
        self._settings = WorkerSettings(tuple(sorted(rings)), device, patience, self._crews.store, here())
        self._processes = {framework: 1 if framework == "jax" else self._settings.most for framework in frameworks}
        self._kept: dict[str, list[Message]] = {}
        self.kinds: dict[str, str] = {}

    def __enter__(self) -> Pool:
        package = __name__.rpartition(".")[0]
        self._crews.__enter__()
        try:
            for framework, count in self._processes.items():
                members = [(rank, self._settings) for rank in range(count)]
                self._crews.start(TITLES[framework], f"{package}.{framework}_side", members)
            for framework in self._processes:
                self._meet(framework)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._crews.__exit__(*error)

    def prepare(self, framework: str, order: Order) -> Outcome:
        """Build the call of ``order`` on each rank, run it once, and return the results and gradients of all ranks."""
        answers: list[Outcome] = self._ask(framework, order)
        shards = {name: [shard for answer in answers for shard in answer.shards.get(name, [])] for name in answers[0].shards}
        return Outcome(shards, answers[0].cotangents)

    def seconds(self, framework: str, order: Order) -> float:
        """Return the time of one run of the prepared call, forward and backward, on the slowest rank, in seconds."""
        return max(self._ask(framework, order))

    def peak_bytes(self, framework: str, order: Order) -> int | None:
        """Return the peak memory of one run in bytes, summed over ranks; None if a rank cannot measure it.
        Memory held before does not count, but on GPUs JAX reports only the peak of its process so far."""
        peaks = self._ask(framework, order)
        return None if None in peaks else sum(peaks)

    def forget(self, framework: str, order: Order) -> None:
        self._ask(framework, order)

    def _meet(self, framework: str) -> None:
        """Wait until all processes have started and counted their devices. Raise ValueError if there are too few devices."""
        found = self._collect(framework, self._processes[framework], max(self._patience, START))
        for data in found:
            if data["devices"] < self._settings.most:
                raise ValueError(
                    f"--device {self._settings.device} with a ring of {self._settings.most} needs as many GPUs, and "
                    f"{TITLES[framework]} sees {data['devices'] or 'none'}: pass "
                    + (f"--ranks {data['devices']}" if data["devices"] else "--device cpu")
                )
        self.kinds[framework] = found[0]["kind"]

    def _ask(self, framework: str, order: Order) -> list[Any]:
        """Send ``order`` to the processes that run the order's ranks (in JAX one), and return their answers sorted by rank."""
        members = 1 if framework == "jax" else order.ranks
        self._crews.send(TITLES[framework], members, order)
        return self._collect(framework, members, self._patience)

    def _collect(self, framework: str, members: int, patience: float) -> list[Any]:
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        began, raised = time.monotonic(), None
        while len(answers) + len(errors) < members:
            for message in self._from(framework):
                rank, data = message.data
                (errors if message.kind == "mistake" else answers)[rank] = data
            now = time.monotonic()
            if errors:
                raised = raised or now
                if now - raised > GRACE:
                    break
            else:
                silent = [rank for rank in range(members) if rank not in answers]
                self._check_patience(framework, silent, now - began, patience)
        if errors:
            raise self._variant_error(framework, members, errors)
        return [answers[rank] for rank in sorted(answers)]

    def _from(self, framework: str) -> list[Message]:
        """Return the new messages of ``framework``, and keep the messages of the other framework for later."""
        for message in self._crews.arrived(0.2):
            self._kept.setdefault(message.crew, []).append(message)
        return self._kept.pop(TITLES[framework], [])

    def _check_patience(self, framework: str, silent: list[int], waited: float, patience: float) -> None:
        """Raise Failure if ``waited`` seconds exceed ``patience``, naming the ``silent`` ranks and the line that each executes.
        If the framework runs in one process, name the framework instead of ranks."""
        if waited <= patience:
            return
        title, several = TITLES[framework], self._processes[framework] > 1
        who = f"{title} rank {', '.join(map(str, silent))}" if several else title
        logs = self._crews.logs()
        at = {rank: where_at(logs.get(f"{title}, process {rank}" if several else title, "")) for rank in silent}
        places = "; ".join(
            f"rank {rank} is at {place}" if several else f"it is at {place}" for rank, place in at.items() if place
        )
        raise Failure(
            f"{who} did not answer for {patience:.0f} s, so everything was ended{f' ({places})' if places else ''}. Ranks wait "
            "for each other where one of them does not communicate; a long case needs a longer --patience"
        )

    def _variant_error(self, framework: str, members: int, errors: dict[int, str]) -> VariantError:
        text = errors[min(errors)]
        everywhere = len(errors) == members and len(set(errors.values())) == 1
        if not everywhere:
            others = "the others did not" if len(errors) < members else "the others said something else"
            text = f"on rank {min(errors)} of {members} ({others}) {text}"
        return VariantError(f"in {TITLES[framework]}: {text}", everywhere)
