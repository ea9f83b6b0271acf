"""Processes that work at the same time and report as they go; none outlives who started it, and none fails in silence."""

from __future__ import annotations

import _thread
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

MOST = 1024
"""Ranks that a command starts on one machine; more are a typing error, and only a list of them would fill its memory."""
Report = Callable[[str, Any], None]
"""``report(kind, data)`` sends a message to the process that started this one."""


def check_count(ranks: int, option: str) -> None:
    """Raise ValueError if a command should start more ranks than one machine runs."""
    if ranks > MOST:
        raise ValueError(f"{option} {ranks} ranks are more than one machine runs: pass at most {MOST}")


class Message(NamedTuple):
    crew: str
    kind: str
    data: Any


class Failure(Exception):
    """A process failed, died or fell silent; the text says which and why."""


class Terminated(SystemExit):
    """SIGTERM has come; the command ends with the exit status that shells give to it."""


def _terminate(number: int, frame: object) -> None:
    raise Terminated(128 + number)


@contextmanager
def hear_interrupts() -> Iterator[None]:
    """Inside this ``with`` raise again a KeyboardInterrupt that came where Python ignores exceptions, as in a callback of JAX."""

    def again(ignored: Any) -> None:
        if ignored.exc_type is KeyboardInterrupt:
            threading.Timer(0.1, _thread.interrupt_main).start()
        else:
            before(ignored)

    before, sys.unraisablehook = sys.unraisablehook, again
    try:
        yield
    finally:
        sys.unraisablehook = before


class Crews:
    """Groups of processes, each under a name. Use as a context: leaving it ends every process that still runs.

    In the main thread SIGTERM leaves it too, as :class:`Terminated`.

    A process runs ``work(report, *arguments)`` of a module that is imported there and not here, so that no process needs a
    framework but the one that uses it. What it prints, libraries' notices included, is kept for the case that it fails.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._members: dict[Connection, _Member] = {}
        self._processes: list[BaseProcess] = []
        self._logs = tempfile.TemporaryDirectory(prefix="ring-attn-", ignore_cleanup_errors=True)

    def start(self, crew: str, module: str, members: list[tuple[Any, ...]]) -> None:
        """One process for each tuple of arguments in ``members``."""
        context = multiprocessing.get_context("spawn")
        for number, arguments in enumerate(members):
            ours, theirs = context.Pipe(duplex=False)
            log = Path(self._logs.name, f"{crew}-{number}")
            process = context.Process(target=_run, args=(theirs, log, module, arguments), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._members[ours] = _Member(crew, crew if len(members) == 1 else f"{crew}, process {number}", process, log)

    def messages(self) -> Iterator[Message]:
        """What the processes report, until all have finished. Raises :class:`Failure`."""
        heard = time.monotonic()
        while self._members:
            ready = wait(list(self._members), timeout=1)
            for pipe in ready:
                yield from self._receive(pipe)  # type: ignore[arg-type]
            if ready:
                heard = time.monotonic()
            elif time.monotonic() - heard > self._patience:
                silent = "; ".join(sorted(member.label for member in self._members.values()))
                raise Failure(f"no process has reported for {self._patience:.0f} s; still at work: {silent}")

    def arrived(self, timeout: float) -> list[Message]:
        """What is reported within so many seconds; nothing where all are silent. Raises :class:`Failure`."""
        return [message for pipe in wait(list(self._members), timeout) for message in self._receive(pipe)]  # type: ignore[arg-type]

    def logs(self) -> dict[str, str]:
        """The last lines that each process still at work has printed, by what it is called in a Failure."""
        return {member.label: member.last_words(200) for member in self._members.values()}

    def _receive(self, pipe: Connection) -> Iterator[Message]:
        member = self._members[pipe]
        try:
            kind, data = pipe.recv()
        except (EOFError, OSError):
            member.process.join(5)
            raise Failure(f"{member.label} {member.end()}\n{member.last_words()}") from None
        if kind == "failed":
            raise Failure(f"{member.label} failed: {data}\n{member.last_words()}")
        if kind == "finished":
            del self._members[pipe]
        else:
            yield Message(member.crew, kind, data)

    def __enter__(self) -> Crews:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _terminate)
        return self

    def __exit__(self, *error: object) -> None:
        for member in self._members.values():
            member.process.terminate()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._logs.cleanup()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)


class _Member(NamedTuple):
    crew: str
    label: str
    process: BaseProcess
    log: Path

    def end(self) -> str:
        """How a process ended that said nothing."""
        if self.process.exitcode == -9:
            return "was killed, as a system does that has no memory left"
        return f"ended with exit code {self.process.exitcode}"

    def last_words(self, most: int = 20) -> str:
        """The last lines that the process printed."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-most:])


def _run(pipe: Connection, log: Path, module: str, arguments: tuple[Any, ...]) -> None:
    """What a started process does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the first one ends the others
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        importlib.import_module(module).work(lambda kind, data: pipe.send((kind, data)), *arguments)
        pipe.send(("finished", None))
    except BrokenPipeError:
        pass  # nobody is left to tell
    except BaseException as error:
        sys.stdout.flush()  # what was printed comes before the traceback
        traceback.print_exc()
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    """A process that is killed ends nobody, and ranks left alone would go on to write checkpoints beside the run begun anew."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
