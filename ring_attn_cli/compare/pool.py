"""The processes of both frameworks, started once and asked case by case: JAX one, PyTorch one for every rank."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..processes import Crews, Failure, Message
from .orders import Order, Outcome, Settings, here, where_at
from .variants import TITLES

GRACE = 1.0
"""Seconds that ranks have to say the same, once one of them has raised an error."""


START = 120.0
"""Seconds that processes have to start, at least: they import their frameworks."""


class Mistake(ValueError):
    """What a variant's function raised. ``everywhere``: on all ranks alike, so that the processes can go on."""

    def __init__(self, text: str, everywhere: bool) -> None:
        super().__init__(text)
        self.everywhere = everywhere


class Pool:
    """Use as a context: leaving it ends every process. ``kinds``: what the devices are, by framework.

    Raises ValueError where there are fewer devices than the largest ring has ranks, and :class:`processes.Failure` where a
    process dies, or no answer has come after ``patience`` seconds.
    """

    def __init__(self, frameworks: tuple[str, ...], rings: tuple[int, ...], device: str, patience: float) -> None:
        self._patience = patience
        self._place = tempfile.TemporaryDirectory(prefix="ring-attn-", ignore_cleanup_errors=True)
        store = str(Path(self._place.name, "store"))
        self._settings = Settings(tuple(sorted(rings)), device, patience, store, here())
        self._crews = Crews(patience)
        self._pipes: dict[str, list[Connection]] = {}
        self._frameworks = frameworks
        self._kept: dict[str, list[Message]] = {}
        self.kinds: dict[str, str] = {}

    def __enter__(self) -> Pool:
        package = __name__.rpartition(".")[0]
        self._crews.__enter__()
        context = multiprocessing.get_context("spawn")
        try:
            for framework in self._frameworks:
                pairs = [context.Pipe() for _ in range(1 if framework == "jax" else self._settings.most)]
                self._pipes[framework] = [ours for ours, _ in pairs]
                members = [(rank, self._settings, theirs) for rank, (_, theirs) in enumerate(pairs)]
                self._crews.start(TITLES[framework], f"{package}.{framework}_side", members)
                for _, theirs in pairs:
                    theirs.close()
            for framework in self._frameworks:
                self._meet(framework)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._crews.__exit__(*error)
        for pipes in self._pipes.values():
            for pipe in pipes:
                pipe.close()
        self._place.cleanup()

    def prepare(self, framework: str, order: Order) -> Outcome:
        """Build it and run it once: its arrays as shards of all ranks."""
        answers: list[Outcome] = self._ask(framework, order)
        shards = {name: [shard for answer in answers for shard in answer.shards.get(name, [])] for name in answers[0].shards}
        return Outcome(shards, answers[0].cotangents)

    def seconds(self, framework: str, order: Order) -> float:
        """How long one run took, on the slowest rank."""
        return max(self._ask(framework, order))

    def peak_bytes(self, framework: str, order: Order) -> int | None:
        """What one run needed at its peak beside its inputs, of all ranks together; None where the system does not tell."""
        peaks = self._ask(framework, order)
        return None if None in peaks else sum(peaks)

    def forget(self, framework: str, order: Order) -> None:
        self._ask(framework, order)

    def _meet(self, framework: str) -> None:
        """Wait until all processes have imported their framework and seen their devices."""
        found = self._collect(framework, len(self._pipes[framework]), max(self._patience, START))
        for data in found:
            if data["devices"] < self._settings.most:
                raise ValueError(
                    f"--device {self._settings.device} with a ring of {self._settings.most} needs as many GPUs, and "
                    f"{TITLES[framework]} sees {data['devices'] or 'none'}: pass "
                    + (f"--ranks {data['devices']}" if data["devices"] else "--device cpu")
                )
        self.kinds[framework] = found[0]["kind"]

    def _ask(self, framework: str, order: Order) -> list[Any]:
        """The answers of the ranks of that ring, in their order."""
        members = 1 if framework == "jax" else order.ranks
        for pipe in self._pipes[framework][:members]:
            with suppress(BrokenPipeError):  # of a process that died: what comes from it next says how
                pipe.send(order)
        return self._collect(framework, members, self._patience)

    def _collect(self, framework: str, members: int, patience: float) -> list[Any]:
        answers: dict[int, Any] = {}
        mistakes: dict[int, str] = {}
        asked, raised = time.monotonic(), None
        while len(answers) + len(mistakes) < members:
            for message in self._from(framework):
                rank, data = message.data
                (mistakes if message.kind == "mistake" else answers)[rank] = data
            now = time.monotonic()
            if mistakes:
                raised = raised or now
                if now - raised > GRACE:
                    break
            else:
                silent = [rank for rank in range(members) if rank not in answers]
                self._check_patience(framework, silent, now - asked, patience)
        if mistakes:
            raise self._mistake(framework, members, mistakes)
        return [answers[rank] for rank in sorted(answers)]

    def _from(self, framework: str) -> list[Message]:
        """What has come from this side; what comes from the other one meanwhile is kept for later."""
        for message in self._crews.arrived(0.2):
            self._kept.setdefault(message.crew, []).append(message)
        return self._kept.pop(TITLES[framework], [])

    def _check_patience(self, framework: str, silent: list[int], waited: float, patience: float) -> None:
        """Raise Failure where that is too long, with where each silent rank is."""
        if waited <= patience:
            return
        title, several = TITLES[framework], len(self._pipes[framework]) > 1
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

    def _mistake(self, framework: str, members: int, mistakes: dict[int, str]) -> Mistake:
        text = mistakes[min(mistakes)]
        everywhere = len(mistakes) == members and len(set(mistakes.values())) == 1
        if not everywhere:
            others = "the others did not" if len(mistakes) < members else "the others said something else"
            text = f"on rank {min(mistakes)} of {members} ({others}) {text}"
        return Mistake(f"in {TITLES[framework]}: {text}", everywhere)
