"""Checkpoints of a training run, written in the background if possible. Incomplete ones are ignored. The newest few are kept.

A save writes to a temporary folder, renames it, and writes ``run.json`` last: see ``model/checkpoint_folder.py`` of the core.
"""

from __future__ import annotations

import json
import warnings
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.model.checkpoint_folder import RUN, BackgroundSaves, wait_for
from ring_attn_core.model.progress import ResumePoint, check_arrays, progress_of, write_run
from ring_attn_core.model.weight_files import read_json

from ..ring.groups import local, rank_in, ranks_of, ring_of
from .checkpoint_files import config_of, copy_to_host, kinds_of, read, save_error, set_copies, stored_kinds, tensors_of, write
from .optimizer_states import (
    States,
    absent,
    check_kept,
    check_optimizer,
    class_of,
    flat,
    groups_of,
    held_states,
    innermost,
    kinds,
    places_for,
    set_groups,
    set_states,
    states_of,
    union,
    with_shards,
)
from .ranks import by_rank, check_kinds, run_on_all


class Checkpoints(BackgroundSaves):
    """The newest checkpoints of a training run: weights, optimizer, random generators, and the position in the data.

        checkpoints = Checkpoints("run/checkpoints", keep=3)
        progress = checkpoints.resume(model, optimizer)  # None without a checkpoint
        ...
        checkpoints.save(step, model, optimizer, data=dataset.state())
        ...
        checkpoints.close()

    ``folder``: the folder of all checkpoints. ``keep``: the number of checkpoints to keep. ``group``: all ranks that train
    together; None is the default group. Each of these ranks makes the same calls and sees ``folder``. If the group has several
    ranks, but not all ranks of the default group, ``save`` returns only when everything is written. It cannot then write in the
    background: that needs a second group, which torch cannot create without the other ranks. Parameters and optimizer states may
    be DTensors (FSDP2, tensor parallelism). Each rank writes its own shards through torch.distributed.checkpoint. A run may be
    resumed on another number of ranks.

    A checkpoint is a folder ``step-000000100`` of safetensors files and JSON; no pickle is written or read. The folder has a
    temporary name until its files are on the disk. ``run.json`` is written last, with a digest of each file. So a kill or a full
    disk at any moment leaves the earlier checkpoints complete. Only one run can write to a folder: the first ``save`` locks it
    until ``close``.
    """

    _failed = staticmethod(save_error)

    def __init__(self, folder: str | Path, *, keep: int = 3, group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
        super().__init__(folder, keep, "step-{:09}")
        ring = ring_of(group)
        self._ring = None if ring is None or ranks_of(ring) == 1 else ring
        self._rank = 0 if self._ring is None else rank_in(self._ring)
        self._background: Any = None
        if self._ring is None:
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        elif ranks_of(self._ring) == dist.get_world_size():  # a group of its own, apart from the training's collectives
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
        """Copy the training state after ``step`` steps to host memory, and write it to the disk in the background.

        ``data``: the return value of ``SequenceShardedDataset.state()``. ``more``: a dict of other JSON values, such as a
        scheduler's ``state_dict()``. Only the first rank's ``data`` and ``more`` are saved. The states of each rank's random
        generators (CPU and current GPU) are saved too. The call first waits for the previous save. If ``group`` has several
        ranks, but not all ranks of the default group, the call returns only when everything is written.

        Raise ValueError if ``step`` is not after the step of the newest checkpoint, ``data`` is neither a str nor None, ``more``
        is not a dict of JSON values, the optimizer keeps states in several optimizers, or ``close`` was called. Raise it too if
        another run saves in the folder, if some ranks do not see the folder that the first rank has made, or if names, shapes or
        dtypes of the model's tensors differ between ranks. Values are not compared (see ``check_ranks``). Raise OSError if the
        previous save has failed, or if this call fails to write. The error is the same on every rank.
        """
        self.wait()
        passed, optimizer = optimizer, innermost(optimizer)
        tensors: dict[str, Any] = {}
        states: States = {}
        run: dict[str, Any] = {}

        def prepare() -> str:
            self._check_open()
            run.update(write_run(ResumePoint(step, data, more or {}), config_of(model)))
            tensors.update(tensors_of(model, self._rank))
            if optimizer is not None:
                check_kept(passed, optimizer)
                states.update(states_of(model, optimizer))
                run.update(optimizer=groups_of(model, optimizer))
            run.update(optimizer_class=class_of(optimizer))
            return sha256(json.dumps(kinds(states), sort_keys=True).encode()).hexdigest()

        values = run_on_all("Checkpoints.save", prepare, self._ring, step=step, optimizer=class_of(optimizer))
        model_tensors = {name: x for name, x in tensors.items() if name.startswith("model.")}
        check_kinds("Checkpoints.save: the model", model_tensors, self._ring)
        begin = lambda: None if self._rank else self._folder.begin(step).name
        new = self.folder / run_on_all("Checkpoints.save: begin", begin, self._ring)[0]
        self._check_shared(new)
        if optimizer is not None and len(set(values)) > 1:
            everybody = run_on_all("Checkpoints.save: states", lambda: kinds(states), self._ring)
            run["absent"] = absent(everybody)
            states = with_shards(model, optimizer, states, union(everybody))
        tensors |= flat(states)

        commit = lambda files: self._commit(new, step, run | {"files": files})
        if self._ring is None or self._background is not None:
            # Not torch's async_save: it refuses a default group that has only NCCL, even if nothing is sent over it.
            self._start(step, write, new, copy_to_host(tensors), commit, self._background)
        else:
            try:
                write(new, tensors, commit, self._ring)
            except BaseException as error:
                raise self._failed(step, error) from error

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> ResumePoint | None:
        """Load the newest checkpoint into weights, optimizer and random generators. Return its ``step``, ``data`` and ``more``.

        Return None and change nothing if no checkpoint exists. ``step``, ``data`` and ``more`` are those passed to ``save``;
        ``more`` is {} if none was passed. Pass ``data`` to ``dataset.resume``. A rank that was not in the saved run keeps the
        states of its generators.

        Raise ValueError if the checkpoint is of another model or optimizer; the message names what differs. Raise it too if ranks
        see different checkpoints, or if the checkpoint is damaged: delete its folder to resume from the previous checkpoint.
        Raise OSError if its tensors cannot be read, or if the previous save has failed. The error is the same on every rank, and
        nothing changes, because everything is first read into host memory.
        """
        self.wait()
        optimizer = innermost(optimizer)
        latest = lambda: max(self.steps(), default=-1)
        newest = max(run_on_all("Checkpoints.resume", latest, self._ring, optimizer=class_of(optimizer)))
        here = lambda: newest if newest < 0 or self._folder.holds(newest) else latest()
        found = run_on_all("Checkpoints.resume: the newest", here, self._ring)
        if len(set(found)) > 1:
            raise ValueError(
                f"{by_rank('the newest checkpoint', [each if each >= 0 else None for each in found])}: all ranks must make the "
                f"same calls and see the same folder, such as {self.folder} on a file system that they share"
            )
        if newest < 0:
            return None
        where = self._folder.where(newest)
        places: dict[str, Any] = {}
        states: States = {}

        def checked() -> tuple[dict[str, Any], ResumePoint]:
            run = read_json(where / RUN)
            progress = progress_of(where / RUN, run, config_of(model))
            mine = tensors_of(model, self._rank)  # FSDP2 shards again what a forward without a backward has gathered
            if optimizer is not None:
                check_optimizer(where / RUN, run, model, optimizer)
            held = stored_kinds(where, run, self._rank, 1 if self._ring is None else ranks_of(self._ring))
            if optimizer is not None:
                states.update(places_for(model, optimizer, held_states(held)))
            places.update({name: x for name, x in mine.items() if not name.startswith("rng.") or name in held} | flat(states))
            others = ("rng.",) if optimizer is not None else ("rng.", "optimizer.")
            compared = lambda kinds: {name: kind for name, kind in kinds.items() if not name.startswith(others)}
            check_arrays(where, compared(kinds_of(places)), compared(held))
            return run, progress

        result: list[tuple[dict[str, Any], ResumePoint]] = []
        run_on_all("Checkpoints.resume: the files", lambda: result.append(checked()), self._ring)
        run, progress = result[0]
        loaded = copy_to_host(places)
        read(where, loaded, self._background or self._ring)
        with torch.no_grad():
            for name, x in places.items():
                if name.startswith("rng."):
                    (torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state)(loaded[name])
                else:
                    local(x).copy_(local(loaded[name]))
        set_copies(model, places)
        if optimizer is not None:
            without = run.get("absent", {})
            same = self._ring is not None and len(without) == ranks_of(self._ring)
            set_states(model, optimizer, states, without.get(str(self._rank), []) if same else [])
            set_groups(optimizer, run["optimizer"])
        return progress

    def _check_shared(self, new: Path) -> None:
        """Raise ValueError on every rank if any rank does not see the folder that the first rank has just created."""
        if self._ring is None:
            return
        sees = run_on_all("Checkpoints.save: the folder", lambda: wait_for(new), self._ring)
        wrong = [str(rank) for rank, each in enumerate(sees) if not each]
        if wrong:
            if self._rank == 0:
                rmtree(new, ignore_errors=True)
            raise ValueError(
                f"rank{'s' * (len(wrong) > 1)} {', '.join(wrong)} cannot see {new}, which rank 0 has made: shards would be lost. "
                f"Put {self.folder} on a file system that all ranks share"
            )
