"""Folders of config.json and safetensors files, which both packages share: rank 0 writes one, every rank reads it.

Loading ranks exchange only errors and digests, of the config and blocks of the files, to detect that they read different saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.replica_check import load_alike
from ring_attn_core.model.weight_files import CONFIG, OWN, Naming, WeightFolder, open_folder, sources
from ring_attn_core.model.weight_names import check_state
from ring_attn_core.model.weight_saving import check_savable, replacing, write

from ..layers.parts import dtype_name
from ..layers.transformer import RingTransformer
from ..ring.groups import Group, is_dtensor, rank_in, ring_of
from .ranks import check_kinds, run_on_all, together
from .weights import named_parameters

LOADING, SAVING = "loading weights", "saving weights"
"""The names of the calls in which ranks exchange errors, for folders of ``save_weights`` and of Hugging Face alike."""


def save_weights(model: nn.Module, folder: str | Path, *, group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
    """Save the weights and the config of a RingTransformer in ``folder``, replacing an existing save.

    The folder holds ``config.json``, written by ``TransformerConfig.to_json``, and the weights: up to 5 GB in
    ``model.safetensors``, above 5 GB in several files with an index. Weights have the names and orientation of ``to_numpy``, and
    keep their dtypes. ``load_weights`` of the JAX or the PyTorch package reads the folder. A temporary folder is written beside
    ``folder`` and then renamed, so after an error or a kill the previous save is complete.

    ``model``: a RingTransformer, or one inside torch.compile, DDP, FSDP2 or tensor parallelism, whose shards are gathered.
    ``group``: all ranks that hold shards or replicas of the model; None is the default group. Each rank must call this
    function; rank 0 writes the folder, and all calls return after that.

    Raise ValueError if the model is not a RingTransformer, if a weight cannot be saved, or if the folder holds files other than a
    save's. Raise it too if names, shapes or dtypes of weights differ between ranks. Raise OSError if the folder cannot be
    written. The error is the same on every rank.
    """
    save_folder(model, folder, lambda config: {CONFIG: config.to_json().encode()}, OWN.renamed, ring_of(group))


def load_weights(
    folder: str | Path, *, dtype: torch.dtype | str | None = None, compute_dtype: torch.dtype | str | None = None, **ring: Any
) -> RingTransformer:
    """Load a RingTransformer from a folder that ``save_weights`` of the JAX or the PyTorch package wrote, on the default device.

    ``dtype``, ``compute_dtype``: the dtypes of the weights and of the computation; None keeps the config's dtype. ``ring``:
    arguments of ``RingTransformer.from_config``, such as ``group`` and ``layout``. Every rank of the group must call this
    function. Each rank reads the files itself, one weight at a time.

    Raise ValueError if the folder does not exist, if the config cannot be read, or if a file is missing or truncated. Raise it
    too if weights are missing or unexpected, or do not have the config's shapes; the error names them. The error is the same on
    every rank, and is raised before any weight is read, unless a file is overwritten during the load.
    """
    return load_folder(folder, OWN, (dtype, compute_dtype), ring)


def load_folder(folder: str | Path, naming: Naming, dtypes: tuple[Any, Any], ring: dict[str, Any]) -> RingTransformer:
    """Load a folder of ``save_weights``, ``save_llama`` or Hugging Face. ``dtypes``: (weights, computation), None: config's."""
    group = ring_of(ring.get("group"))

    def describe(held: WeightFolder) -> tuple[Any, TransformerConfig]:
        config, named = naming.config(held), zip(("param_dtype", "compute_dtype"), dtypes, strict=True)
        own = replace(config, **{name: dtype_name(x) for name, x in named if x is not None})
        with torch.device("meta"):
            model = RingTransformer.from_config(own, **ring)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        return (model, sources(held, shapes, naming.renamed, naming.ignored(own))), config

    opened = lambda: open_folder(folder, "pt", str(torch.get_default_device()))
    return load_alike(opened, lambda: together(LOADING, group), describe, _fill)


def _fill(empty: tuple[RingTransformer, dict[Path, dict[str, str]]], held: WeightFolder) -> RingTransformer:
    """Load weights into a model on the meta device, one at a time. ``empty``: it, and by file {name in it: name in the file}."""
    model, files = empty
    kept = dict(model.named_parameters())
    state = {}
    for file, names in files.items():
        weights = held.files[file].weights
        for name, theirs in names.items():
            state[name] = weights.get_tensor(theirs).to(kept[name].dtype, copy=True)  # copied out of the mapped file
    model.load_state_dict(state, assign=True)
    return model


def save_folder(
    model: nn.Module,
    folder: str | Path,
    files: Callable[[TransformerConfig], dict[str, bytes]],
    renamed: Callable[[str], str],
    ring: Group,
) -> None:
    """Save the RingTransformer's weights, ``renamed``, and ``files(config)``. Every rank of ``ring`` must call it."""
    from safetensors.torch import save_file

    parameters: dict[str, nn.Parameter] = {}
    beside: dict[str, bytes] = {}

    def check() -> None:
        inner = transformer_in(model)
        beside.update(files(inner.config))
        parameters.update(named_parameters(inner))
        for name, p in parameters.items():
            check_savable(name, str(p.dtype).removeprefix("torch."), valued=not p.is_meta)
        with torch.device("meta"):
            expected = dict(RingTransformer.from_config(inner.config).named_parameters())
        shapes = [{name: tuple(p.shape) for name, p in each.items()} for each in (expected, parameters)]
        check_state(shapes[0], shapes[1], most=8)

    run_on_all(SAVING, check, ring)
    check_kinds(SAVING, parameters, ring)
    weights = _whole(parameters)

    def save() -> None:
        try:
            if ring is None or rank_in(ring) == 0:
                with replacing(folder, beside) as new:
                    for name, content in beside.items():
                        (new / name).write_bytes(content)
                    write(new, ((renamed(name), x) for name, x in weights), save_file)
        finally:
            for _ in weights:  # ranks that do not write, or failed in the middle, take part in gathering the shards
                pass

    run_on_all(SAVING, save, ring)


def transformer_in(model: nn.Module) -> RingTransformer:
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, RingTransformer):
            return module
    theirs = [m for m in model.modules() if hasattr(m, "save_pretrained")] if isinstance(model, nn.Module) else []
    remedy = (
        ". Save a model of transformers or PEFT by its save_pretrained: docs/transformers.md, Saving under FSDP2"
        if theirs
        else ""
    )
    raise ValueError(f"weights are saved of a RingTransformer, or of what wraps one, got {type(model).__name__}{remedy}")


def _whole(parameters: dict[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    for name, p in parameters.items():
        x = p.detach()
        yield name, (x.full_tensor() if is_dtensor(x) else x).cpu().contiguous()
