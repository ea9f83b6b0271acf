"""The files of a checkpoint: safetensors that torch.distributed.checkpoint writes and reads, each rank its shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ring_attn_core.model.checkpoint_folder import check_files, digests
from ring_attn_core.model.weight_files import opened

from ..ring.groups import Group

SHARDS = "DCP_SHARDING_INFO"
"""The entry of a safetensors header that says which part of a tensor a file holds."""


def copied(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return copies of tensors and DTensors in host memory, whatever the default device is: torch's stager names none."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    with torch.device("cpu"):
        return dict(BlockingAsyncStager(cache_staged_state_dict=False).stage(tensors))


def write(folder: Path, tensors: dict[str, Any], commit: Callable[[dict[str, Any]], None], group: Group) -> None:
    """Write this rank's part into ``folder``; then the first rank calls ``commit`` with size and digest of each file.

    Every rank of ``group`` calls it. Raises the same on all of them if one fails.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.futures import Future

    class Writer(HuggingFaceStorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            results = super().write_data(plan, planner).wait()
            found = digests(folder, sorted({result.storage_data.relative_path for result in results}))
            done: Any = Future()
            done.set_result([replace(result, storage_data=found) for result in results])  # which the first rank is sent
            return done

        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, results)
            found: dict[str, Any] = {}
            for of_rank in results:
                found |= of_rank[0].storage_data if of_rank else {}
            commit(found)

    writer = Writer(str(folder), save_distributed=True)
    save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)  # type: ignore[arg-type]


def shapes(where: Path, run: dict[str, Any], rank: int, ranks: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a checkpoint. Raise ValueError that names a damaged file."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    for file in where.glob("*.safetensors"):
        _check_header(file)
    check_files(where, run, ".safetensors", rank, ranks)
    try:
        found = HuggingFaceStorageReader(str(where)).read_metadata().state_dict_metadata
    except Exception as error:
        raise ValueError(f"{where} cannot be read ({error}): delete it to resume from the checkpoint before") from error
    return {name: tuple(each.size) for name, each in found.items()}  # type: ignore[union-attr]


def read(where: Path, places: dict[str, Any], group: Group) -> None:
    """Read tensors into ``places``, as all ranks of ``group`` do. Raise OSError on all of them if one fails."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        load(places, storage_reader=HuggingFaceStorageReader(str(where)), process_group=group, no_dist=group is None)  # type: ignore[arg-type]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is not an Exception
        rank, first = reason(error)
        raise OSError(f"{where} could not be read, and nothing has changed: {first} (rank {rank})") from error


def reason(error: BaseException) -> tuple[int, BaseException]:
    """Return the lowest rank that failed, and its error, from what torch.distributed.checkpoint raises."""
    failures = getattr(error, "failures", None) or {0: (error, None)}
    rank, (first, _) = min(failures.items())
    return rank, first


def _check_header(file: Path) -> None:
    """Raise ValueError if a file is truncated or does not say which part of each tensor it holds."""
    with opened(file) as tensors:  # which compares its length with what its header promises
        text = (tensors.metadata() or {}).get(SHARDS)
        if text is None:
            return
        try:
            parts = json.loads(text)
            for name in list(tensors.keys()):
                offsets, shape = parts[name]["saved_offsets"], tensors.get_slice(name).get_shape()
                if len(offsets) != len(shape) or not all(type(x) is int and x >= 0 for x in offsets):
                    raise TypeError(f"saved_offsets of {name} are {offsets}")
        except (ValueError, KeyError, TypeError, RecursionError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{file} is damaged, {SHARDS} in its header must give the saved_offsets of each tensor ({error}): delete "
                "this checkpoint to resume from the one before"
            ) from error
