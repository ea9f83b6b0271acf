"""The arrays of a JAX checkpoint as files. Each process writes and reads its own shards through orbax."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import jax

from ring_attn_core.model.checkpoint_folder import RUN, check_files, digests, wait_for
from ring_attn_core.model.progress import Kinds
from ring_attn_core.model.weight_files import read_json

T = TypeVar("T")

STATE = "state"

EARLIER = "run/metadata"
"""The file with the run's progress in a checkpoint of an earlier version. Such a checkpoint has no digests."""

PATIENCE_MS = 20 * 60 * 1000
"""Milliseconds that a process waits for the others at each of the two barriers at the end of a save. Orbax has the same limit."""

WRITTEN = ".written-{}"
"""Name of the file by which process ``{}`` says that its shards are written. Process 0 deletes these files afterwards."""

_saves = count()


class CheckpointFiles:
    """A writer and reader of arrays by orbax's handler: in its checkpointer's barriers all would wait for a failed process."""

    def __init__(self) -> None:
        import orbax.checkpoint as orbax

        self._handler = orbax.PyTreeCheckpointHandler()
        self._writes: list[Any] = []

    def begin(self, folder: Path, arrays: dict[str, jax.Array]) -> None:
        """Copy the arrays to host memory, and start writing this process's shards into ``folder``."""
        import orbax.checkpoint as orbax

        self._writes = []
        (folder / STATE).mkdir(exist_ok=True)
        saving = self._handler.async_save(_orbax_path(folder / STATE), args=orbax.args.PyTreeSave(arrays))
        self._writes = list(_complete(saving) or ())

    def abandon(self) -> None:
        """Wait until the writes that ``begin`` started here have ended. Ignore their errors: the save has failed already."""
        for write in self._writes:
            with suppress(Exception):
                write.result()

    def end(self, folder: Path, done: Path, commit: Callable[[dict[str, Any]], None]) -> None:
        """Wait until all have written; process 0 then calls ``commit``, which renames ``folder`` to ``done``. A failed process
        raises its own error, and each other one an OSError."""
        from orbax.checkpoint import multihost

        number, barrier, processes = next(_saves), multihost.get_barrier_sync_fn(), jax.process_count()
        meet = lambda name: barrier(key=f"ring_attn/checkpoint/{number}/{name}", timeout_ms=PATIENCE_MS)
        marks = [folder / WRITTEN.format(process) for process in range(processes)]
        writes, self._writes = self._writes, []  # they hold the copies in host memory
        try:
            try:
                for write in writes:
                    write.result()
                marks[jax.process_index()].touch()
            finally:
                meet("written")
            if jax.process_index() == 0:
                _check_written(marks)
                self._handler.finalize(_orbax_path(folder / STATE))
                commit(digests(folder))
        finally:
            meet("completed")
        if not wait_for(done / RUN):
            raise OSError("process 0 could not complete it")

    def read(self, where: Path, like: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the arrays that ``like`` names, each sharded like the array in ``like``. No process waits for another."""
        import orbax.checkpoint as orbax

        places = jax.tree.map(orbax.utils.to_shape_dtype_struct, like)
        restore = orbax.args.PyTreeRestore(
            places, restore_args=orbax.checkpoint_utils.construct_restore_args(places), partial_restore=True
        )
        return self._handler.restore(_orbax_path(where / STATE), args=restore)

    def kinds(self, where: Path, run: dict[str, Any]) -> Kinds:
        """Return (dtype, shape) of each array in a checkpoint. Each process compares all file sizes and its share of digests."""
        check_files(where, run, None, jax.process_index(), jax.process_count())
        try:
            found: Any = self._handler.metadata(_orbax_path(where / STATE))
        except ValueError as error:
            raise OSError(str(error)) from error
        return {name: (str(x.dtype), tuple(x.shape)) for name, x in getattr(found, "tree", found).items()}

    def close(self) -> None:
        """Stop orbax's threads."""
        self._handler.close()


def _orbax_path(path: Path) -> Any:
    from etils.epath import Path as OrbaxPath

    return OrbaxPath(path)


def _complete(saving: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop and return its result; in a new thread, if this thread already runs an event loop."""

    def run() -> T:
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(saving)
        finally:
            loop.close()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1, "checkpoint-copy") as thread:
        return thread.submit(run).result()


def _check_written(marks: list[Path]) -> None:
    """Delete ``marks``, the ``WRITTEN`` files of all processes; a missing one means that its process could not write."""
    absent = [str(process) for process, mark in enumerate(marks) if not wait_for(mark)]
    if absent:
        raise OSError(f"process{'es' * (len(absent) > 1)} {', '.join(absent)} could not write")
    for mark in marks:
        mark.unlink()


def run_of(where: Path) -> tuple[Path, dict[str, Any]]:
    """Return (path, content) of the JSON file that records the run's progress in the checkpoint folder ``where``."""
    file = where / RUN if (where / RUN).exists() or not (where / EARLIER).exists() else where / EARLIER
    return file, read_json(file)
