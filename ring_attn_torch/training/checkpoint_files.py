"""Reading and writing of a checkpoint's safetensors files. Each rank handles its own shards by torch.distributed.checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ring_attn_core.model.checkpoint_folder import check_files, digests
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.progress import Kinds
from ring_attn_core.model.replica_check import name_entries
from ring_attn_core.model.weight_files import open_weights
from ring_attn_core.validation import in_words

from ..layers.transformer import RingTransformer
from ..ring.groups import Group, local
from .optimizer_states import check_tensors
from .weights import inside

SHARDS = "DCP_SHARDING_INFO"
"""The key in a safetensors header for the offsets of the tensor shards in the file."""


def tensors_of(model: nn.Module, rank: int) -> dict[str, Any]:
    """Return the model's tensors, not copied, as ``model.NAME``, and this rank's generator states as ``rng.RANK.DEVICE``."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    name_entries((inside(model, name), x) for name, x in (*model.named_parameters(), *model.named_buffers()))  # no name twice
    found: dict[str, Any] = {f"model.{name}": x for name, x in get_model_state_dict(model).items()}
    check_tensors(found)
    found[f"rng.{rank}.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        found[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return found


def set_copies(model: nn.Module, tensors: dict[str, Any]) -> None:
    """Load ``tensors`` into ``model`` if some are copies, as of ``get_extra_state`` or of a hook of ``state_dict``."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    held = {local(x).data_ptr() for x in (*model.parameters(), *model.buffers())}
    found = {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}
    if any(x.numel() and local(x).data_ptr() not in held for x in found.values()):
        set_model_state_dict(model, found)


def config_of(model: nn.Module) -> TransformerConfig | None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {in_words(model)}: several fit into an nn.ModuleDict")
    return next((module.config for module in model.modules() if isinstance(module, RingTransformer)), None)


def kinds_of(tensors: dict[str, Any]) -> Kinds:
    return {name: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in tensors.items()}


def copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Copy tensors and DTensors to the host. torch's stager allocates on the default device, so the CPU is made the default."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    with torch.device("cpu"):
        return dict(BlockingAsyncStager(cache_staged_state_dict=False).stage(tensors))


def write(folder: Path, tensors: dict[str, Any], commit: Callable[[dict[str, Any]], None], group: Group) -> None:
    """Write this rank's shards of ``tensors``; the first rank then calls ``commit``. If a rank of ``group`` fails, all raise."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.futures import Future

    class Writer(HuggingFaceStorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            results = super().write_data(plan, planner).wait()
            found = digests(folder, sorted({result.storage_data.relative_path for result in results}))
            done: Any = Future()
            done.set_result([replace(result, storage_data=found) for result in results])  # sent to the first rank
            return done

        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, results)
            found: dict[str, Any] = {}
            for written in results:
                found |= written[0].storage_data if written else {}
            commit(found)

    writer = Writer(str(folder), save_distributed=True)
    save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)  # type: ignore[arg-type]


def stored_kinds(where: Path, run: dict[str, Any], rank: int, ranks: int) -> Kinds:
    """Map the name of each tensor in the folder ``where`` to (dtype, shape). Raise ValueError if a file is damaged. Each rank
    compares all file sizes with ``run`` (the checkpoint's run.json); together the ``ranks`` ranks compare all digests."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    for file in where.glob("*.safetensors"):
        _check_header(file)
    check_files(where, run, ".safetensors", rank, ranks)
    try:
        found = HuggingFaceStorageReader(str(where)).read_metadata().state_dict_metadata
    except Exception as error:
        raise ValueError(f"{where} cannot be read ({error}): delete it to resume from the checkpoint before") from error
    kind = lambda each: (str(each.properties.dtype).removeprefix("torch."), tuple(each.size))
    return {name: kind(each) for name, each in found.items()}


def read(where: Path, places: dict[str, Any], group: Group) -> None:
    """Read tensors of the folder ``where`` into those of their names in ``places``. If a rank fails, all raise OSError."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        load(places, storage_reader=HuggingFaceStorageReader(str(where)), process_group=group, no_dist=group is None)  # type: ignore[arg-type]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is not an Exception
        rank, first = reason(error)
        raise OSError(f"{where} could not be read, and nothing has changed: {first} (rank {rank})") from error


def save_error(step: int, error: BaseException) -> BaseException:
    """Return the OSError of a failed save, which quotes the lowest failed rank's error; interrupts stay as they are."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    rank, first = reason(error)
    return OSError(
        f"the checkpoint of step {step} could not be saved, and those before it are as they were: {first} (rank {rank})"
    )


def reason(error: BaseException) -> tuple[int, BaseException]:
    """Return (lowest failed rank, its error) from an exception of torch.distributed.checkpoint."""
    failures = getattr(error, "failures", None) or {0: (error, None)}
    rank, (first, _) = min(failures.items())
    return rank, first


def _check_header(file: Path) -> None:
    """Raise ValueError if a file is truncated, or if the entry ``SHARDS`` of its header lacks valid offsets for a tensor."""
    with open_weights(file) as tensors:  # checks the file's length against its header
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
