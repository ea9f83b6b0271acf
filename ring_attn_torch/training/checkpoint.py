"""Checkpoints of a run: written while it goes on, each whole or not there at all, the newest few kept."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.mistakes import in_words
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.progress import Progress, check_arrays, check_keep, check_next, described, progress_of
from ring_attn_core.model.weight_files import opened, read_json, to_disk

from ..layers.attention import ring_of
from ..layers.transformer import RingTransformer
from ..ring.agreement import tell
from ..ring.groups import rank_in, ranks_of

RUN = "run.json"
"""The file of a checkpoint that says how far the run has come; the others are safetensors."""


class Checkpoints:
    """The newest checkpoints of a run, in ``folder``: weights, optimizer, random generators, and where the data stands.

        checkpoints = Checkpoints("run/checkpoints", keep=3)
        progress = checkpoints.resume(model, optimizer)  # None where there is none yet
        ...
        checkpoints.save(step, model, optimizer, data=dataset.state())
        ...
        checkpoints.close()

    ``keep``: how many stay. ``group``: all ranks that train together; None is the default group. Each makes the same calls, and
    all of them see ``folder``. Where they are but a part of the default group, ``save`` returns when all is written, for torch
    makes no second group of them without the ranks that take no part. Parameters and optimizer states may be DTensors (FSDP2,
    tensor parallelism): each rank writes its shards through torch.distributed.checkpoint, and a run may be resumed on another
    number of ranks.

    A checkpoint is a folder ``step-000000100`` of safetensors files and JSON; no pickle is written or read. It has another name
    until all of it is on the disk, so that a kill or a full disk at any moment leaves the ones before it whole.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3, group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
        check_keep(keep)
        self.folder, self.keep = Path(folder).resolve(), keep
        ring = ring_of(group)
        self._ring = None if ring is None or ranks_of(ring) == 1 else ring
        self._rank = 0 if self._ring is None else rank_in(self._ring)
        self._pending: tuple[int, Future[Any]] | None = None
        self._background = None
        if self._ring is None:
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        elif ranks_of(self._ring) == dist.get_world_size():  # one of its own, away from the training's collectives
            self._background = dist.new_group(backend="gloo")

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        data: str | None = None,
        more: dict[str, Any] | None = None,
    ) -> None:
        """Begin to save the run after ``step`` steps, and return as soon as everything is copied to host memory.

        ``data``: what ``SequenceShardedDataset.state()`` returns. ``more``: anything else that JSON can hold, such as a
        scheduler's ``state_dict()``. The generators of this rank's CPU and GPU are saved too. Waits for the save before.

        Raises ValueError for a step that is not after the newest one and for what is not JSON, and OSError where the save before
        has failed, the same on every rank.
        """
        from torch.distributed.checkpoint.state_dict_saver import save as save_now

        self.wait()
        tensors = _tensors(model, optimizer if optimizer and optimizer.state else None, self._rank)  # asking makes empty states
        described_run: dict[str, Any] = {}

        def prepare() -> None:
            described_run.update(described(Progress(step, data, more or {}), _config(model)), optimizer=_groups(optimizer))
            check_next(step, self.steps(), self.folder)
            for left in self.folder.glob(".step-*"):  # by a run that was killed, or a save that failed
                rmtree(left, ignore_errors=True)
            self._saving(step).mkdir(parents=True)

        self._by_first_rank("Checkpoints.save", prepare, ("step", step))
        new, done = self._saving(step), self.folder / f"step-{step:09}"
        writer = _writer(new, lambda: self._commit(new, done, described_run))
        if self._ring is None or self._background is not None:
            # Not torch's async_save, which refuses a default group of NCCL alone even if nothing is sent over it.
            copies, thread = writer.stage(tensors), ThreadPoolExecutor(1, "checkpoint")
            no_dist = self._ring is None
            saving = thread.submit(save_now, copies, storage_writer=writer, process_group=self._background, no_dist=no_dist)
            thread.shutdown(wait=False)  # once the save is done
            self._pending = step, saving
        else:
            try:
                save_now(tensors, storage_writer=writer, process_group=self._ring)
            except BaseException as error:
                raise _failed(step, error) from error

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Progress | None:
        """Set weights, optimizer and generators to those of the newest checkpoint; None, and nothing changed, without one.

        Returns ``step``, ``data`` for ``dataset.resume(data)``, and ``more``. A rank that had no part in the saved run keeps its
        generators. Raises ValueError for a checkpoint of another model or optimizer, naming what differs, and for one that is
        damaged, naming the file: delete its folder to resume from the one before; and where ranks see other checkpoints than the
        first. Then neither weights nor generators change.
        """
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        self.wait()
        steps = self.steps()
        self._by_first_rank("Checkpoints.resume", lambda: None, ("the newest checkpoint", steps[-1] if steps else None))
        if not steps:
            return None
        where = self.folder / f"step-{steps[-1]:09}"
        found = read_json(where / RUN)
        progress = progress_of(where, found, _config(model))
        for file in where.glob("*.safetensors"):
            with opened(file):  # which compares its length with what its header promises
                pass
        reader = HuggingFaceStorageReader(str(where))
        held = {name: tuple(each.size) for name, each in reader.read_metadata().state_dict_metadata.items()}  # type: ignore[union-attr]
        _check_groups(where, optimizer, found.get("optimizer"))
        with_states = any(name.startswith("optimizer.") for name in held)
        mine = _tensors(model, optimizer if with_states else None, self._rank)
        mine = {name: x for name, x in mine.items() if not name.startswith("rng.") or name in held}
        others = ("rng.",) if optimizer is not None else ("rng.", "optimizer.")
        compared = lambda shapes: {name: shape for name, shape in shapes.items() if not name.startswith(others)}
        check_arrays(where, compared({name: tuple(x.shape) for name, x in mine.items()}), compared(held))
        load(mine, storage_reader=reader, process_group=self._background or self._ring, no_dist=self._ring is None)  # type: ignore[arg-type]
        if optimizer is not None:
            _set_groups(optimizer, found["optimizer"], with_states)
        for name in mine:
            if name.startswith("rng."):
                (torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state)(mine[name])
        return progress

    def wait(self) -> None:
        """Wait for the save under way, if any; OSError where it has failed, which says that the ones before it are whole."""
        if self._pending is None:
            return
        (step, saving), self._pending = self._pending, None
        try:
            saving.result()
        except BaseException as error:
            raise _failed(step, error) from error

    def close(self) -> None:
        """Wait for the save under way, as ``wait`` does: at the end of the run."""
        self.wait()

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, in ascending order."""
        named = (re.fullmatch(r"step-(\d{9,})", path.name) for path in self.folder.glob("step-*"))
        return sorted(int(name[1]) for name in named if name)

    def _saving(self, step: int) -> Path:
        """What the folder of a checkpoint is called while it is written."""
        return self.folder / f".step-{step:09}.saving"

    def _by_first_rank(self, call: str, function: Callable[[], None], alike: tuple[str, Any]) -> None:
        """Call the function on the first rank, and raise on all what it raises there.

        ``alike``: what all ranks must have alike, by its name; ValueError on all where they do not.
        """
        error = None
        try:
            if self._rank == 0:
                function()
        except (ValueError, OSError) as objection:
            error = objection
        if self._ring is None:
            if error is not None:
                raise error
            return
        name, mine = alike
        told = tell(call, {"error": error and [isinstance(error, OSError), str(error)], "alike": in_words(mine)}, self._ring)
        first, values = told[0]["error"], [each["alike"] for each in told]
        if first is not None:
            raise (OSError if first[0] else ValueError)(f"rank 0: {first[1]}") from error
        if len(set(values)) > 1:
            raise ValueError(
                f"{name} is {', '.join(f'{value} on rank {rank}' for rank, value in enumerate(values))}: all ranks must make the "
                f"same calls and see the same folder, such as {self.folder} on a file system that they share"
            )

    def _commit(self, new: Path, done: Path, run: dict[str, Any]) -> None:
        """Give a checkpoint its name, once every rank has written its part, and delete those beyond ``keep``."""
        (new / RUN).write_text(json.dumps(run, indent=2))
        for path in (new / RUN, new):  # torch has waited for its files
            to_disk(path)
        new.rename(done)
        to_disk(self.folder)
        for step in self.steps()[: -self.keep]:
            going = self.folder / f".step-{step:09}.deleted"
            (self.folder / f"step-{step:09}").rename(going)
            rmtree(going, ignore_errors=True)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name: the model's and the optimizer's own, in which a load sets them, and generators.

    Raises ValueError for an optimizer whose states are no tensors.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    found: dict[str, Any] = {f"model.{name}": x for name, x in get_model_state_dict(model).items()}
    if optimizer is not None:
        if not optimizer.state:
            optimizer.zero_grad()  # what makes the states of a new optimizer does not where there are gradients
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        states = get_optimizer_state_dict(model, optimizer, options=options)
        found |= {f"optimizer.{name}": x for name, x in states.items() if name.startswith("state.") and x is not None}
    strange = [name for name, x in found.items() if not isinstance(x, Tensor)]
    if strange:
        raise ValueError(
            f"{', '.join(strange[:8])} must be tensors to be saved, as those of torch's own modules and optimizers are"
        )
    found[f"rng.{rank}.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        found[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return found


def _groups(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]] | None:
    """The numbers and flags of every group of parameters, such as lr, and how many parameters it has."""
    if optimizer is None:
        return None
    plain = lambda name, x: len(x) if name == "params" else x.item() if isinstance(x, Tensor) else x
    return [{name: plain(name, x) for name, x in group.items()} for group in optimizer.param_groups]


def _check_groups(where: Path, optimizer: torch.optim.Optimizer | None, found: Any) -> None:
    """ValueError where the checkpoint has no optimizer, or one with other groups of parameters."""
    if optimizer is None:
        return
    if not isinstance(found, list):
        raise ValueError(f"{where} was saved without an optimizer: resume without one")
    theirs, mine = ([group["params"] for group in groups] for groups in (found, _groups(optimizer) or []))
    if theirs != mine:
        raise ValueError(f"the optimizer of {where} has groups of {theirs} parameters, and this one of {mine}: make it as it was")


def _set_groups(optimizer: torch.optim.Optimizer, found: list[dict[str, Any]], with_states: bool) -> None:
    """Set what ``_groups`` gave; without states in the checkpoint the optimizer has made no step yet."""
    if not with_states:
        optimizer.state.clear()
    for group, values in zip(optimizer.param_groups, found, strict=True):
        for name, x in values.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(x)
            elif name != "params":
                group[name] = tuple(x) if isinstance(x, list) else x  # betas, of which JSON makes a list


def _failed(step: int, error: BaseException) -> BaseException:
    """What a save that ended in ``error`` raises: an OSError with the first rank's reason, or an interrupt as it is."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    failures = getattr(error, "failures", None) or {0: (error, None)}  # of torch.distributed.checkpoint, by rank
    rank, (first, _) = min(failures.items())
    return OSError(
        f"the checkpoint of step {step} could not be saved, and those before it are as they were: {first} (rank {rank})"
    )


def _config(model: nn.Module) -> TransformerConfig | None:
    """The config of the RingTransformer that the model is or wraps."""
    return next((module.config for module in model.modules() if isinstance(module, RingTransformer)), None)


def _writer(folder: Path, commit: Callable[[], None]) -> Any:
    """A writer of torch.distributed.checkpoint that calls ``commit``, on the first rank, once all have written."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    class Writer(HuggingFaceStorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, results)
            commit()

    return Writer(str(folder), save_distributed=True)
