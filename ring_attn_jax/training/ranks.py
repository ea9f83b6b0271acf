"""Checks, by all-gathered digests, that all devices and processes hold the same weights, seeds and arguments.

The ranks of one process run one traced program, so ``ring_attention`` need not compare arguments, as it does in PyTorch. Several
processes trace several programs, and the user calls ``check_ranks``.

If one process fails to read or write weights or checkpoints, ``run_on_all`` and ``together`` raise its error in all processes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.tree_util import GetAttrKey, keystr, tree_leaves_with_path

from ring_attn_core.model.replica_check import (
    RankDifference,
    Replica,
    Table,
    array_content,
    array_kind,
    check_alike,
    check_plain,
    check_replicas,
    differences,
    name_entries,
    plain_replica,
    table_digest,
    tables_from_json,
)
from ring_attn_core.validation import in_words

REMEDY = "Put one device's values on all of them (jax.device_put), and pass the same seeds and arguments in every process"


def check_ranks(what: Any) -> None:
    """Compare the replicas of each value in ``what``, and raise ValueError if they differ.

    Call it at the start of training, outside of jit. ``what``: a pytree of arrays (JAX's, jax.random keys, NumPy's), numbers,
    str, bool, None, masks, Runs, nnx modules and their states, such as ``{"model": model, "dropout_seed": seed, "mask": mask}``.
    If an array's sharding places one part of the array on several devices, the copies of this part are replicas. Replicas may
    differ without an error after ``shard_map(check_vma=False)``, ``jax.make_array_from_single_device_arrays`` and the like.

    With several processes (``jax.distributed``) the replicas of a global array are compared across all processes. An array on the
    devices of a single process, or a value that is not a JAX array, must then be equal in all processes. All processes must call
    ``check_ranks`` at the same point of the program. If a process does not make the call, the others wait for it, as in any
    collective of JAX.

    Values are compared bit for bit, by digests of 64 bits: NaN equals NaN of the same bits, 0.0 is not -0.0. Types, dtypes and
    shapes are compared too. The contents of arrays without replicas are not read.

    The error names up to 8 values that differ and the devices or processes that hold them, or a value that cannot be compared,
    such as a traced one. With several processes the error is the same in all of them.
    """
    processes, error = jax.process_count(), None
    try:
        table = {name: _replicas(x) for name, x in name_entries(_entries(what)).items()}
    except Exception as objection:
        error, table = objection, {}
    if processes == 1 and error is not None:
        raise error
    tables = [table] if processes == 1 else _tables_of_all(table, error)
    check_replicas(tables, "process", REMEDY)


def _entries(what: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of each leaf of the pytree ``what``."""
    for path, x in tree_leaves_with_path(what, is_leaf=lambda x: x is None):
        is_variable = isinstance(path[-1], GetAttrKey) and path[-1].name == "value" if path else False
        name = keystr(path[:-1] if is_variable else path, simple=True, separator=".") or "what"
        if isinstance(x, Tracer):
            raise ValueError(f"{name} is traced and has no value yet: call check_ranks outside of jit, grad and shard_map")
        if not isinstance(x, jax.Array):
            check_plain(name, x, "a pytree of jax arrays")
        check_exists(name, x)
        yield name, x


def check_exists(name: str, x: Any) -> None:
    if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
        raise ValueError(f"{name} was deleted, as a donated array is: pass the one that took its place")


def _replicas(x: Any) -> list[Replica]:
    """Return the Replicas of ``x`` in this process: its copies that must equal other copies, in this process or in others.

    A jax.Array has a Replica for each local device whose shard another device also holds, or for each device if every process
    should hold the same array; else one of its dtype and shape only. Other values have one.
    """
    if not isinstance(x, jax.Array):
        return [plain_replica(("process", jax.process_index()), x)]
    kind = array_kind("Array", x.dtype, x.shape)
    parts = {device: _part(index, x.shape) for device, index in x.sharding.devices_indices_map(x.shape).items()}
    held, on_every_process = Counter(parts.values()), jax.process_count() > 1 and x.is_fully_addressable
    replicas = []
    for shard in x.addressable_shards:
        part = parts[shard.device]
        if held[part] > 1 or on_every_process:
            replicas.append(Replica(("device", shard.device.id), kind, _content(shard.data), part))
    return replicas or [Replica(("process", jax.process_index()), kind, "an array without copies")]


def _part(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """Return the name of a part of an array, such as "part [0:2, 0:8]", or "" for the whole array."""
    spans = [span.indices(size)[:2] for span, size in zip(index, shape, strict=True)]
    if spans == [(0, size) for size in shape]:
        return ""
    return f"part [{', '.join(f'{first}:{end}' for first, end in spans)}]"


def _content(x: jax.Array) -> str:
    values = np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    return array_content(values.tobytes(), values.item() if values.size == 1 else None)


def _tables_of_all(table: Table, error: Exception | None) -> list[Table]:
    """Return the tables {name: replicas} of all processes, or only this process's if all digests agree and no replicas differ."""
    mine = "" if error else table_digest(table)
    if set(_gather(mine)) == {mine} and not error and not differences([table], "process"):
        return [table]
    everybody = [json.loads(encoded) for encoded in _gather(json.dumps({"error": error and str(error), "table": table}))]
    for process, each in enumerate(everybody):
        if each["error"] is not None:
            raise ValueError(f"process {process}: {each['error']}") from error
    return tables_from_json(each["table"] for each in everybody)


def _gather(text: str) -> list[str]:
    """All-gather one text of each process. Return the texts in the order of the process indices."""
    encoded = np.frombuffer(text.encode(errors="replace"), np.uint8)
    lengths = np.ravel(multihost_utils.process_allgather(np.array([encoded.size], np.int32)))
    texts = np.asarray(multihost_utils.process_allgather(np.pad(encoded, (0, lengths.max() - encoded.size))))
    return [each[:length].tobytes().decode() for each, length in zip(texts, lengths, strict=True)]


def gather_to_host(x: jax.Array) -> np.ndarray:
    return np.ascontiguousarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))


@contextmanager
def together(call: str, mesh: Any) -> Iterator[list[str]]:
    """Run the block in all processes, and raise the first failed one's error in all. It is a RankDifference if the block
    succeeded elsewhere or appended texts differ. Without a ``mesh`` of all processes, each raises its own."""
    error, alike = None, list[str]()
    try:
        yield alike
    except Exception as objection:
        error = objection
    processes = {device.process_index for device in mesh.devices.flat} if isinstance(mesh, Mesh) else set()
    if jax.process_count() == 1 or len(processes) < jax.process_count():
        if error is not None:
            raise error
        return
    everybody = _exchange(error, RankDifference, {"alike": alike})
    check_alike(f"what processes have read while {call}", "process", [", ".join(report["alike"]) for report in everybody])


def _exchange(error: Exception | None, on_some: type[ValueError], report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the ``report`` of each process, or raise their first error in each: as ``on_some`` if not all have one."""
    mine = report | {"error": error and [isinstance(error, OSError), str(error)]}
    reports = [json.loads(text) for text in _gather(json.dumps(mine))]
    errors = [report["error"] for report in reports]
    for process, each in enumerate(errors):
        if each is not None:
            kind = OSError if each[0] else on_some if None in errors else ValueError
            raise kind(f"process {process}: {each[1]}") from error
    return reports


def check_kinds(arrays: Mapping[str, Any]) -> None:
    if jax.process_count() == 1:
        return
    owner = ("process", jax.process_index())
    table = {name: [Replica(owner, array_kind("Array", x.dtype, x.shape), "")] for name, x in arrays.items()}
    if len(set(_gather(table_digest(table)))) > 1:
        tables = tables_from_json(json.loads(each) for each in _gather(json.dumps(table)))
        check_replicas(tables, "process", "Make the same model in every process")


def run_on_all(function: Callable[[], Any], **alike: int | str | None) -> list[Any]:
    """Return all processes' values of ``function``, which JSON can hold. ``alike`` must be equal. All raise the first failed
    process's error: an OSError as such, others as a ValueError."""
    error, value = None, None
    try:
        value = function()
    except Exception as objection:
        error = objection
    if jax.process_count() == 1:
        if error is not None:
            raise error
        return [value]
    gathered = _exchange(error, ValueError, {"value": value, "alike": {name: in_words(x) for name, x in alike.items()}})
    for name in alike:
        values = [each["alike"][name] for each in gathered]
        if len(set(values)) > 1:
            raise ValueError(f"{by_process(name, values)}: all processes must make the same calls")
    return [each["value"] for each in gathered]


def by_process(name: str, values: list[Any]) -> str:
    return f"{name} is {', '.join(f'{value} in process {process}' for process, value in enumerate(values))}"
