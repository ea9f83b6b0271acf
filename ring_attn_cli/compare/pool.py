"""The processes of both frameworks, started once for all cases: one for JAX, and one for each rank of PyTorch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ..processes import Failure, WorkerGroups
from .messages import Request, WorkerSettings
from .variants import TITLES
from .worker import find_line

GRACE = 1.0
"""Seconds to wait for the other ranks' errors after the first rank has reported one."""

START = 120.0
"""Least timeout, in seconds, for processes to start and import their frameworks."""


class VariantError(ValueError):
    """An error of a variant's function. If ``everywhere``, all ranks raised the same error, and the processes stay usable."""

    def __init__(self, text: str, everywhere: bool) -> None:
        super().__init__(text)
        self.everywhere = everywhere


class Pool(WorkerGroups):
    """The worker processes of each framework, ended on exit. ``kinds``: by framework, "cpu" or the name of a GPU."""

    def __init__(self, frameworks: tuple[str, ...], rings: tuple[int, ...], device: str, patience: float) -> None:
        super().__init__(patience)
        self._settings = WorkerSettings(tuple(sorted(rings)), device, patience, self.store, str(Path.cwd()))
        self._processes_of = {framework: 1 if framework == "jax" else self._settings.most for framework in frameworks}
        self.kinds: dict[str, str] = {}

    def __enter__(self) -> Pool:
        package = __name__.rpartition(".")[0]
        super().__enter__()
        try:
            for framework, count in self._processes_of.items():
                members = [(rank, self._settings) for rank in range(count)]
                self.start(TITLES[framework], f"{package}.{framework}_worker", members)
            for framework, count in self._processes_of.items():
                found = self._collect(framework, count, max(self._settings.patience, START))
                self._check_devices(framework, min(each["devices"] for each in found))
                self.kinds[framework] = found[0]["kind"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def ask(self, framework: str, request: Request) -> list[Any]:
        """Send ``request`` to the processes that run its ranks (in JAX one), and return their answers sorted by rank."""
        members = 1 if framework == "jax" else request.ranks
        self.send(TITLES[framework], members, request)
        return self._collect(framework, members, self._settings.patience)

    def _check_devices(self, framework: str, devices: int) -> None:
        if devices < self._settings.most:
            remedy = f"--ranks {devices}" if devices else "--device cpu"
            raise ValueError(
                f"--device {self._settings.device} with a ring of {self._settings.most} needs as many GPUs, and "
                f"{TITLES[framework]} sees {devices or 'none'}: pass {remedy}"
            )

    def _collect(self, framework: str, members: int, patience: float) -> list[Any]:
        """Return the next answer of each rank. After an error of a rank, wait for those of the others, and raise them as one."""
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        began, end = time.monotonic(), float("inf")
        while len(answers) + len(errors) < members and time.monotonic() < end:
            for message in self.receive(TITLES[framework], 0.2):
                rank, data = message.data
                (errors if message.kind == "mistake" else answers)[rank] = data
            if errors:
                end = min(end, time.monotonic() + GRACE)
            elif time.monotonic() - began > patience:
                raise self._silence(framework, [rank for rank in range(members) if rank not in answers], patience)
        if errors:
            raise self._variant_error(framework, members, errors)
        return [answers[rank] for rank in sorted(answers)]

    def _silence(self, framework: str, silent: list[int], patience: float) -> Failure:
        """Return a Failure with the ``silent`` ranks, or the framework if it is one process, and the line that each executes."""
        title, several = TITLES[framework], self._processes_of[framework] > 1
        who = f"{title} rank {', '.join(map(str, silent))}" if several else title
        logs = self.logs()
        lines = {rank: find_line(logs.get(f"{title}, process {rank}" if several else title, "")) for rank in silent}
        places = "; ".join(f"rank {rank} is at {at}" if several else f"it is at {at}" for rank, at in lines.items() if at)
        return Failure(
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
