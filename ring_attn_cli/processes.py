"""Groups of spawned processes that report over pipes, for the commands that start processes.

A process exits when its parent does. If a process fails, the parent raises an error that shows the last 20 lines of its log.
"""

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

MAX_RANKS = 1024
"""Most ranks that a command starts on one machine. A larger number is probably a typing error."""
Report = Callable[[str, Any], None]
"""A function ``report(kind, data)`` that sends a message to the parent process."""


class Worker(NamedTuple):
    """A process's connection to its parent: ``worker(kind, data)`` sends a message."""

    pipe: Connection

    def __call__(self, kind: str, data: Any) -> None:
        self.pipe.send((kind, data))

    def recv(self) -> Any:
        """Return the next message. Raise EOFError when the parent has closed the pipe."""
        return self.pipe.recv()


def check_installed(packages: Iterable[str]) -> None:
    for name in (package.partition(".")[0] for package in packages):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"no module named {name}", name=name)


def check_count(ranks: int, option: str) -> None:
    if ranks > MAX_RANKS:
        raise ValueError(f"{option} {ranks} ranks are more than one machine runs: pass at most {MAX_RANKS}")


class Message(NamedTuple):
    group: str
    kind: str
    data: Any


class Failure(Exception):
    """A failure of spawned processes: one raised an error or died, or none reported in time. The message names the processes."""


class Terminated(SystemExit):
    """An exit of the command by SIGTERM. Its exit status is 128 + 15, as in shells."""


def _terminate(number: int, frame: object) -> None:
    raise Terminated(128 + number)


@contextmanager
def hear_interrupts() -> Iterator[None]:
    """Raise a KeyboardInterrupt again after 0.1 s if Python ignored it, as in a callback of JAX, by ``sys.unraisablehook``."""

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


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Delay the KeyboardInterrupt of a Ctrl-C until the ``with`` block has ended. A second Ctrl-C raises it at once."""
    held: list[int] = []

    def hold(number: int, frame: object) -> None:
        held.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)


_preloaded: list[str] = []


def preload(module: str) -> None:
    """Import ``module`` once for all ranks: in the server that they are forked from, if it has not started."""
    if module not in _preloaded:
        _preloaded.append(module)
        multiprocessing.set_forkserver_preload([*_preloaded, *({"ring_attn_cli.main"} & {*sys.modules})])


def choose_context(module: str, members: int) -> Any:
    """Return the context of processes that run ``module``: ranks on CPUs are forked, for each import of PyTorch takes seconds.
    Ranks on GPUs and a single process are spawned."""
    if members == 1 or sys.platform != "linux" or Path("/dev/nvidiactl").exists():
        return multiprocessing.get_context("spawn")
    preload(module)
    return multiprocessing.get_context("forkserver")


class WorkerGroups:
    """Named groups of worker processes; the exit of the context ends each process that still runs. SIGTERM raises
    :class:`Terminated` in the main thread. A process, not the parent, imports a module and calls its ``work(report,
    *arguments)``, with a log."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._pipes: dict[str, list[Connection]] = {}
        self._members: dict[Connection, _Member] = {}
        self._processes: list[BaseProcess] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ring-attn-", ignore_cleanup_errors=True)
        self.store = str(Path(self._folder.name, "store"))
        """An unused path for the file store by which the ranks of a PyTorch process group find each other."""

    def start(self, group: str, module: str, members: list[tuple[Any, ...]]) -> None:
        """Start the processes of a group: each calls ``work`` of ``module`` with one tuple of arguments in ``members``."""
        context = choose_context(module, len(members))
        for number, arguments in enumerate(members):
            ours, theirs = context.Pipe()
            log = Path(self._folder.name, f"{group}-{number}")
            process = context.Process(target=_run, args=(theirs, log, module, arguments), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.setdefault(group, []).append(ours)
            label = group if len(members) == 1 else f"{group}, process {number}"
            self._members[ours] = _Member(group, label, process, log)

    def send(self, group: str, count: int, data: Any) -> None:
        for pipe in self._pipes[group][:count]:
            with suppress(OSError):  # a dead process: its last message says why
                pipe.send(data)

    def messages(self) -> Iterator[Message]:
        """Yield messages until all processes have finished. Raise ValueError with a "mistake", and :class:`Failure` after a
        failed process or a silence of ``patience`` seconds."""
        heard = time.monotonic()
        while self._members:
            ready = wait(list(self._members), timeout=1)
            for message in (message for pipe in ready for message in self._receive(pipe)):  # type: ignore[arg-type]
                if message.kind == "mistake":
                    raise ValueError(message.data)
                yield message
            if ready:
                heard = time.monotonic()
            elif time.monotonic() - heard > self._patience:
                silent = "; ".join(sorted(member.label for member in self._members.values()))
                raise Failure(f"no process has reported for {self._patience:.0f} s; still at work: {silent}")

    def receive(self, group: str, timeout: float) -> list[Message]:
        """Wait up to ``timeout`` seconds for messages of a group, and return at most one from each process; [] if none came."""
        pipes = [pipe for pipe in self._pipes[group] if pipe in self._members]
        return [message for pipe in wait(pipes, timeout) for message in self._receive(pipe)]  # type: ignore[arg-type]

    def logs(self) -> dict[str, str]:
        """Return the last 200 printed lines of each unfinished process, by a label such as "PyTorch, process 0"."""
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
            yield Message(member.group, kind, data)

    def __enter__(self) -> WorkerGroups:
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
        for pipe in (pipe for pipes in self._pipes.values() for pipe in pipes):
            pipe.close()
        self._folder.cleanup()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)


class _Member(NamedTuple):
    group: str
    label: str
    process: BaseProcess
    log: Path

    def end(self) -> str:
        if self.process.exitcode == -9:
            return "was killed, as a system does that has no memory left"
        return f"ended with exit code {self.process.exitcode}"

    def last_words(self, most: int = 20) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-most:])


def _run(pipe: Connection, log: Path, module: str, arguments: tuple[Any, ...]) -> None:
    """Call ``work(report, *arguments)`` of ``module`` as the target of a new process, and report its end or error."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent ends them
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        worker = Worker(pipe)
        importlib.import_module(module).work(worker, *arguments)
        worker("finished", None)
    except BrokenPipeError:
        pass  # the parent is gone
    except BaseException as error:
        sys.stdout.flush()  # print the traceback after earlier output
        traceback.print_exc()
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    """Exit when the parent ends. Else ranks of a killed parent would go on and write checkpoints beside those of a new run."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
