"""Checkpoints of a run: written while it goes on, each whole or not there at all, the newest few kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.progress import Progress, check_arrays, check_keep, check_next, described, progress_of

from ..layers.transformer import RingTransformer


class Checkpoints:
    """The newest checkpoints of a run, in ``folder``: weights, optimizer, random generators, and where the data stands.

        checkpoints = Checkpoints("run/checkpoints", keep=3)
        progress = checkpoints.resume(model, optimizer)  # None where there is none yet
        ...
        checkpoints.save(step, model, optimizer, data=dataset.state())
        ...
        checkpoints.close()

    ``keep``: how many stay. Between several processes (``jax.distributed``) each makes the same calls, and all of them see
    ``folder``. Arrays may be sharded over any mesh: each process writes its shards through orbax, and a run may be resumed on
    another mesh.

    A checkpoint is a folder ``step_100`` of arrays and JSON; no pickle is written or read. It has another name until all of it
    is on the disk, so that a kill or a full disk at any moment leaves the ones before it whole.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3) -> None:
        import orbax.checkpoint as orbax

        check_keep(keep)
        self.folder, self.keep = Path(folder).resolve(), keep
        options = orbax.CheckpointManagerOptions(max_to_keep=keep, step_prefix="step", cleanup_tmp_directories=True)
        handlers = {"state": orbax.PyTreeCheckpointHandler(), "run": orbax.JsonCheckpointHandler()}
        self._manager = orbax.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        self._pending: int | None = None

    def save(
        self,
        step: int,
        model: nnx.Module,
        optimizer: nnx.Optimizer | None = None,
        *,
        data: str | None = None,
        more: dict[str, Any] | None = None,
    ) -> None:
        """Begin to save the run after ``step`` steps, and return as soon as everything is copied to host memory.

        ``data``: what ``SequenceShardedDataset.state()`` returns. ``more``: anything else that JSON can hold, such as seeds. Of
        ``model`` and ``optimizer`` every nnx variable is saved, ``nnx.Rngs`` among them. Waits for the save before.

        Raises ValueError for a step that is not after the newest one and for what is not JSON, and OSError where the save before
        has failed.
        """
        import orbax.checkpoint as orbax

        self.wait()
        run = described(Progress(step, data, more or {}), _config(model)) | {"optimizer": optimizer is not None}
        check_next(step, self.steps(), self.folder)
        arrays = {name: _plain(variable.get_value()) for name, (_, variable) in _variables(model, optimizer).items()}
        items = orbax.args.Composite(state=orbax.args.PyTreeSave(arrays), run=orbax.args.JsonSave(run))
        self._pending = step
        try:
            self._manager.save(step, args=items)
        except OSError as error:
            raise self._failed(error) from error

    def resume(self, model: nnx.Module, optimizer: nnx.Optimizer | None = None) -> Progress | None:
        """Set all variables of ``model`` and ``optimizer`` to those of the newest checkpoint; None, and nothing changed, without.

        Arrays keep their shardings. Returns ``step``, ``data`` for ``dataset.resume(data)``, and ``more``. Raises ValueError for
        a checkpoint of another model or optimizer, naming what differs, and for one that is damaged: delete its folder to resume
        from the one before. Then nothing changes.
        """
        import orbax.checkpoint as orbax

        self.wait()
        steps = self.steps()
        if not steps:
            return None
        where = self.folder / f"step_{steps[-1]}"
        try:
            restored: Any = self._manager.restore(steps[-1], args=orbax.args.Composite(run=orbax.args.JsonRestore()))
            run = restored.run
            metadata = self._manager.item_metadata(steps[-1]).state
            held = {name: tuple(x.shape) for name, x in metadata.tree.items()}
        except Exception as error:
            raise _damaged(where, error) from error
        progress = progress_of(where, run, _config(model))
        if optimizer is not None and not run.get("optimizer"):
            raise ValueError(f"{where} was saved without an optimizer: resume without one")
        mine = _variables(model, optimizer)
        arrays = {name: _plain(variable.get_value()) for name, (_, variable) in mine.items()}
        compared = held if optimizer is not None else {name: x for name, x in held.items() if name.startswith("model.")}
        check_arrays(where, {name: tuple(x.shape) for name, x in arrays.items()}, compared)
        like = jax.tree.map(orbax.utils.to_shape_dtype_struct, arrays)
        restore = orbax.args.PyTreeRestore(
            like, restore_args=orbax.checkpoint_utils.construct_restore_args(like), partial_restore=True
        )
        try:
            restored = self._manager.restore(steps[-1], args=orbax.args.Composite(state=restore))
            found = restored.state
        except Exception as error:
            raise _damaged(where, error) from error
        for which, module in (("model", model), ("optimizer", optimizer)):
            names = [name for name in mine if name.startswith(f"{which}.")]
            if names:
                flat = ((path, variable, found[name]) for name, (path, variable) in mine.items() if name in names)
                nnx.update(module, nnx.from_flat_state([(path, v.replace(_like(v.get_value(), x))) for path, v, x in flat]))
        return progress

    def wait(self) -> None:
        """Wait for the save under way, if any; OSError where it has failed, which says that the ones before it are whole."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error
        self._pending = None

    def close(self) -> None:
        """Wait for the save under way, as ``wait`` does, and release orbax's threads: at the end of the run."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, in ascending order."""
        return sorted(self._manager.all_steps())

    def _failed(self, error: Exception) -> OSError:
        step, self._pending = self._pending, None
        return OSError(f"the checkpoint of step {step} could not be saved, and those before it are as they were: {error}")


def _variables(model: nnx.Module, optimizer: nnx.Optimizer | None) -> dict[str, tuple[tuple[Any, ...], nnx.Variable]]:
    """By name, model.blocks.0 and so on: the path in flax and the variable; ValueError for what is no nnx module."""

    def each() -> Iterator[tuple[str, tuple[tuple[Any, ...], nnx.Variable]]]:
        for which, module in (("model", model), ("optimizer", optimizer)):
            if not isinstance(module, nnx.Pytree) and (which == "model" or module is not None):
                raise ValueError(
                    f"{which} must be an nnx module, got {type(module).__name__}: "
                    "optax's transformations become one as nnx.Optimizer(model, transformation, wrt=nnx.Param)"
                )
            for path, variable in nnx.to_flat_state(nnx.state(module)) if module is not None else ():
                yield ".".join(map(str, (which, *path))), (path, variable)

    return dict(each())


def _plain(x: jax.Array) -> jax.Array:
    """The array, and of keys of jax.random the integers that they are made of."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _like(x: jax.Array, plain: jax.Array) -> jax.Array:
    """What ``_plain`` was given, as keys where ``x`` are keys."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(plain, impl=jax.random.key_impl(x)) if is_key else plain


def _config(model: nnx.Module) -> TransformerConfig | None:
    """The config of a RingTransformer."""
    return model.config if isinstance(model, RingTransformer) else None


def _damaged(where: Path, error: Exception) -> ValueError:
    return ValueError(f"{where} is damaged ({error}): delete this folder to resume from the one before")
