"""Checkpoints of a training run, written in the background. Incomplete ones are ignored. The newest few are kept.

A save writes to a temporary folder, renames it, and writes ``run.json`` last: see ``model/checkpoint_folder.py`` of the core.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import jax
from flax import nnx

from ring_attn_core.model.checkpoint_folder import RUN, BackgroundSaves, wait_for
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.progress import ResumePoint, check_arrays, progress_of, write_run

from ..layers.transformer import RingTransformer
from .checkpoint_files import EARLIER, CheckpointFiles, run_of
from .checkpoint_values import kind_of, kinds_for, place, set_values, split, values_of
from .ranks import by_process, check_kinds, run_on_all


class Checkpoints(BackgroundSaves):
    """The newest checkpoints of a training run: weights, optimizer, random generators, and the position in the data.

        checkpoints = Checkpoints("run/checkpoints", keep=3)
        progress = checkpoints.resume(model, optimizer)  # None without a checkpoint
        ...
        checkpoints.save(step, model, optimizer, data=dataset.state())
        ...
        checkpoints.close()

    ``folder``: the folder of all checkpoints. ``keep``: the number of checkpoints to keep. With several processes
    (``jax.distributed``) each of them makes the same calls and sees ``folder``. Arrays may be sharded over any mesh: each process
    writes its shards through orbax, and a run may be resumed on another mesh.

    A checkpoint is a folder ``step_100`` of arrays and JSON; no pickle is written or read. The folder has a temporary name until
    its arrays are written. ``run.json`` is written last, with a digest of each file. So a kill or a full disk at any moment
    leaves the earlier checkpoints complete. Only one run can write to a folder: the first ``save`` locks it until ``close``.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3) -> None:
        super().__init__(folder, keep, "step_{}", (RUN, EARLIER))
        self._files = CheckpointFiles()

    def save(
        self,
        step: int,
        model: nnx.Module,
        optimizer: nnx.Optimizer | None = None,
        *,
        data: str | None = None,
        more: dict[str, Any] | None = None,
    ) -> None:
        """Copy the training state after ``step`` steps to host memory, and write it to the disk in the background.

        ``data``: the return value of ``SequenceShardedDataset.state()``. ``more``: a dict of other JSON values, such as seeds.
        Only the first process's ``data`` and ``more`` are saved. All nnx variables of ``model`` and ``optimizer`` but
        ``nnx.Intermediate`` are saved: arrays, ``nnx.Rngs``, numbers and texts. The call first waits for the previous save. No
        array is read after the call returns, so the next training step may donate the arrays to jit.

        Raise ValueError if ``step`` is not after the step of the newest checkpoint, ``data`` is neither a str nor None, ``more``
        is not a dict of JSON values, an array was deleted, two names join alike, or ``close`` was called. Raise it too if another
        run saves in the folder, if a process does not see the folder that process 0 has made, or if names, shapes or dtypes of
        arrays differ between processes. Values are not compared (see ``check_ranks``). The error is the same in each process.
        Raise OSError in each process if the previous save has failed, or if any process cannot start to write.
        """
        self.wait()
        arrays: dict[str, jax.Array] = {}
        run: dict[str, Any] = {}

        def prepare() -> None:
            self._check_open()
            run.update(write_run(ResumePoint(step, data, more or {}), _config(model)), optimizer=optimizer is not None)
            found, others = split(values_of(model, optimizer))
            arrays.update(found)
            run.update(others, optimizer_class=_class_of(optimizer))

        run_on_all(prepare, step=step, optimizer=_class_of(optimizer))
        check_kinds(arrays)
        new = self.folder / run_on_all(lambda: "" if jax.process_index() else self._folder.begin(step).name)[0]
        sees = run_on_all(lambda: wait_for(new))
        wrong = [str(process) for process, each in enumerate(sees) if not each]
        if wrong:
            if jax.process_index() == 0:
                rmtree(new, ignore_errors=True)
            raise ValueError(
                f"process{'es' * (len(wrong) > 1)} {', '.join(wrong)} cannot see {new}, which process 0 has made: shards would "
                f"be lost. Put {self.folder} on a file system that all processes share"
            )

        try:
            run_on_all(lambda: self._files.begin(new, arrays))
        except Exception as error:
            self._files.abandon()
            if isinstance(error, OSError):
                raise self._failed(step, error) from error
            raise
        commit = lambda files: self._commit(new, step, run | {"files": files})
        self._start(step, self._files.end, new, self._folder.where(step), commit)

    def resume(self, model: nnx.Module, optimizer: nnx.Optimizer | None = None) -> ResumePoint | None:
        """Load the newest checkpoint into all variables of ``model`` and ``optimizer``, and return the saved progress.

        Without a checkpoint return None and change nothing. Arrays keep their shardings. The result holds the ``step``, ``data``
        and ``more`` that were passed to ``save``; ``more`` is {} if none was passed. Pass ``data`` to ``dataset.resume``.

        The present values of arrays are not read, except those of random keys. So the arrays of a large model may be deleted
        before the call (``x.delete()``), and the devices then hold only one copy of the model.

        Raise ValueError if the checkpoint is of another model or optimizer; the message names what differs. Raise it too if the
        checkpoint is damaged or unreadable; the message names the file or folder. (Delete the checkpoint's folder to resume from
        the previous checkpoint.) Raise it also if processes see different checkpoints. In these cases nothing changes, and each
        process raises the same error. Raise OSError if the previous save has failed.
        """
        self.wait()
        latest = lambda: max(self.steps(), default=-1)
        newest = max(run_on_all(latest, optimizer=_class_of(optimizer)))
        here = lambda: newest if newest < 0 or self._folder.holds(newest) else latest()
        found = run_on_all(here)
        if len(set(found)) > 1:
            listed = by_process("the newest checkpoint", [each if each >= 0 else None for each in found])
            raise ValueError(
                f"{listed}: all processes must see the same folder, such as {self.folder} on a file system that they share"
            )
        if newest < 0:
            return None
        where = self._folder.where(newest)
        loaded: dict[str, Any] = {}
        arrays: dict[str, Any] = {}

        def checked() -> ResumePoint:
            file, run = run_of(where)
            progress = progress_of(file, run, _config(model))
            if optimizer is not None and run.get("optimizer") is not True:
                raise ValueError(f"{where} was saved without an optimizer: resume without one")
            mine = values_of(model, optimizer)
            kind = run.get("optimizer_class")
            if optimizer is not None and kind not in (None, _class_of(optimizer)):  # None in an earlier version
                raise ValueError(
                    f"the optimizer of {where} has states of {kind}, and this one of {_class_of(optimizer)}: make it as it was"
                )
            try:
                held = self._files.kinds(where, run)
                held |= {name: (dtype, tuple(shape)) for name, (dtype, shape) in run.get("empty", {}).items()}
                held |= {name: kind_of(x) for name, x in run.get("values", {}).items()}
            except ValueError:
                raise
            except Exception as error:
                raise _damage_error(where, error) from error
            compared = held if optimizer is not None else {name: x for name, x in held.items() if name.startswith("model.")}
            kinds = kinds_for(mine, compared, model, optimizer)
            check_arrays(where, kinds, compared)
            places = {name: place(x, kinds[name]) for name, x in mine.items() if name not in run.get("values", {})}
            arrays.update({name: x for name, x in places.items() if name not in run.get("empty", {})})
            loaded.update(run.get("values", {}) | {name: x for name, x in places.items() if name not in arrays})
            return progress

        result: list[ResumePoint] = []

        def read() -> None:
            try:
                loaded.update(self._files.read(where, arrays))
            except Exception as error:
                raise _damage_error(where, error) from error

        run_on_all(lambda: result.append(checked()))
        run_on_all(read)
        set_values(model, optimizer, loaded)
        return result[0]

    def close(self) -> None:
        """Wait for the save in progress, as ``wait`` does, unlock the folder for other runs, and release orbax's threads."""
        try:
            super().close()
        finally:
            self._files.close()

    def _failed(self, step: int, error: BaseException) -> OSError:
        return OSError(f"the checkpoint of step {step} could not be saved, and those before it are as they were: {error}")


def _class_of(optimizer: nnx.Optimizer | None) -> str | None:
    """Return the class names of the optimizer's optax states: optax's transformations have no names of their own."""

    def each(x: Any) -> Iterator[str]:
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            yield type(x).__name__
        for inner in x.values() if type(x) is dict else x if isinstance(x, tuple) else ():
            yield from each(inner)

    return None if optimizer is None else ", ".join(each(getattr(optimizer, "opt_state", None)))


def _config(model: nnx.Module) -> TransformerConfig | None:
    return next((module.config for _, module in nnx.iter_graph(model) if isinstance(module, RingTransformer)), None)


def _damage_error(where: Path, error: Exception) -> ValueError:
    return ValueError(f"{where} is damaged ({error}): delete this folder to resume from the one before")
