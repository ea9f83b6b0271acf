"""The files of a JAX checkpoint: arrays. Each process writes and reads its shards by orbax."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import jax

from ring_attn_core.model.checkpoint_folder import RUN, check_files, digests, seen
from ring_attn_core.model.progress import Kinds
from ring_attn_core.model.weight_files import read_json

STATE = "state"
"""The folder of the arrays within a checkpoint."""

EARLIER = "run/metadata"
"""The file with the run's progress in checkpoints of earlier versions. These have no digests."""

PATIENCE_MS = 20 * 60 * 1000
"""Milliseconds that a process waits for the others at the end of a save, as in orbax."""

_saves = count()


class CheckpointFiles:
    """A writer and reader of named arrays through orbax. Writing runs in the background."""

    def __init__(self) -> None:
        import orbax.checkpoint as orbax

        self._orbax = orbax.AsyncCheckpointer(orbax.PyTreeCheckpointHandler())

    def begin(self, folder: Path, arrays: dict[str, jax.Array]) -> None:
        """Copy the arrays to host memory, and start writing this process's shards into ``folder``."""
        import orbax.checkpoint as orbax

        self._orbax.save(folder / STATE, args=orbax.args.PyTreeSave(arrays))

    def end(self, folder: Path, done: Path, commit: Callable[[dict[str, Any]], None]) -> None:
        """Wait until all processes have written. The first one then passes the size and digest of each file to ``commit``.

        ``done``: the folder's path once ``commit`` has renamed it. Call this in a background thread. If the first process fails,
        it raises its own error and each other process an OSError.
        """
        from orbax.checkpoint import multihost

        self._orbax.wait_until_finished()
        try:
            if jax.process_index() == 0:
                commit(digests(folder))
        finally:
            multihost.get_barrier_sync_fn()(key=f"ring_attn/checkpoint/{next(_saves)}", timeout_ms=PATIENCE_MS)
        if not seen(done / RUN):
            raise OSError("process 0 could not complete it")

    def read(self, where: Path, like: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the arrays of a checkpoint by name, each with the sharding of its namesake in ``like``."""
        import orbax.checkpoint as orbax

        places = jax.tree.map(orbax.utils.to_shape_dtype_struct, like)
        restore = orbax.args.PyTreeRestore(
            places, restore_args=orbax.checkpoint_utils.construct_restore_args(places), partial_restore=True
        )
        return self._orbax.restore(where / STATE, args=restore)

    def kinds(self, where: Path, run: dict[str, Any]) -> Kinds:
        """Return (dtype, shape) of each array in a checkpoint. Raise ValueError, naming the file, if a file is damaged.

        ``run``: the content of ``run.json``, whose digests are compared with the files. Each process compares its part.
        """
        check_files(where, run, None, jax.process_index(), jax.process_count())
        found: Any = self._orbax.metadata(where / STATE)
        tree = getattr(found, "item_metadata", found)
        return kinds_of(getattr(tree, "tree", tree))

    def close(self) -> None:
        """Stop orbax's threads."""
        self._orbax.close()


def kinds_of(arrays: dict[str, Any]) -> Kinds:
    """Return (dtype, shape) of each array, or array description, by name."""
    return {name: (str(x.dtype), tuple(x.shape)) for name, x in arrays.items()}


def run_of(where: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path and the content of the file that records the run's progress."""
    file = where / RUN if (where / RUN).exists() or not (where / EARLIER).exists() else where / EARLIER
    return file, read_json(file)
