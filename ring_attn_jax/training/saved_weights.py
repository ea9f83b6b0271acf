"""Saving and loading of weights: a folder of config.json and safetensors files, which the JAX and the PyTorch package share.

Saving: shards are gathered, and process 0 writes a new folder beside the old one, calls fsync, and renames it. Loading: every
process reads all weights from the files, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.replica_check import load_alike
from ring_attn_core.model.weight_files import CONFIG, OWN, Naming, WeightFolder, open_folder, sources
from ring_attn_core.model.weight_names import check_state
from ring_attn_core.model.weight_saving import check_savable, replacing, write

from ..layers.parts import dtype_name
from ..layers.transformer import RingTransformer
from .ranks import check_exists, check_kinds, gather_to_host, run_on_all, together
from .weights import _parameters, _transpose

LOADING = "loading weights"


def save_weights(model: RingTransformer, folder: str | Path) -> None:
    """Save the weights and the config of a RingTransformer in ``folder``, replacing an existing save.

    The folder holds ``config.json``, written by ``TransformerConfig.to_json``, and ``model.safetensors``, or beyond 5 GB several
    files and an index. Weights have the names and orientation of ``to_numpy``, each in its own dtype. ``load_weights`` of the JAX
    or the PyTorch package reads the folder. A temporary folder is written beside ``folder`` and then renamed, so after an error
    or a kill the previous save is complete.

    Sharded weights are gathered. With several processes (``jax.distributed``) each must call ``save_weights``. Process 0 writes,
    and no call returns before the save is complete. Raise ValueError if the model is not a RingTransformer, if names, shapes or
    dtypes of weights differ between processes, or if the folder holds files other than a save's. Raise OSError if the folder
    cannot be written. The error is the same in each process.
    """
    save_folder(model, folder, lambda config: {CONFIG: config.to_json().encode()}, OWN.renamed)


def load_weights(folder: str | Path, *, dtype: Any = None, compute_dtype: Any = None, **ring: Any) -> RingTransformer:
    """Load a RingTransformer from a folder that ``save_weights`` of the JAX or the PyTorch package wrote.

    ``dtype``, ``compute_dtype``: the dtypes of the weights and of the computation; None: the dtype in the config. ``ring``: the
    arguments of ``RingTransformer.from_config``, such as ``mesh`` and ``layout``, except ``rngs``. With ``mesh`` the weights are
    copied to all of its devices, otherwise to the default device. Each process of the mesh must call ``load_weights``, and reads
    the files itself, one weight at a time.

    Raise ValueError if the folder does not exist, the config cannot be read, or a file is missing or truncated. Raise it also if
    weights are missing, unexpected or of another shape than in the config. The error names the folder, files or weights, and is
    the same in each process if the mesh spans all processes. It is raised before any weight is read, unless a file is overwritten
    during the load.
    """
    return load_folder(folder, OWN, (dtype, compute_dtype), ring)


def load_folder(folder: str | Path, naming: Naming, dtypes: tuple[Any, Any], ring: dict[str, Any]) -> RingTransformer:
    """Load a RingTransformer from a folder that ``save_weights``, ``save_llama`` or Hugging Face wrote.
    ``dtypes``: (of the weights, of the computation), None for the config's. Processes of a mesh over all of them retry."""

    def describe(held: WeightFolder) -> tuple[Empty, TransformerConfig]:
        config, named = naming.config(held), zip(("param_dtype", "compute_dtype"), dtypes, strict=True)
        own = replace(config, **{name: dtype_name(x) for name, x in named if x is not None})
        return prepare_empty(held, own, naming, ring), config

    return load_alike(lambda: open_folder(folder), lambda: together(LOADING, ring.get("mesh")), describe, fill)


class Empty(NamedTuple):
    """A model without weight values, the names {in the model: in the file} of each file, and the weights' sharding."""

    model: RingTransformer
    files: dict[Path, dict[str, str]]
    sharding: jax.NamedSharding | None


def prepare_empty(held: WeightFolder, config: TransformerConfig, naming: Naming, ring: dict[str, Any]) -> Empty:
    """Return the model of ``config`` without weight values, and the weights to read from each file of the folder ``held``."""
    model = nnx.eval_shape(lambda: RingTransformer.from_config(config, **ring, rngs=nnx.Rngs(0)))
    shapes = {name: _shape(path, p) for name, (path, p) in _parameters(model).items()}
    mesh = ring.get("mesh")
    everywhere = None if mesh is None else jax.NamedSharding(mesh, jax.P())
    return Empty(model, sources(held, shapes, naming.renamed, naming.ignored(config)), everywhere)


def fill(empty: Empty, held: WeightFolder) -> RingTransformer:
    model, everywhere = empty.model, empty.sharding
    kept = _parameters(model)
    flat = []
    for file, names in empty.files.items():
        weights = held.files[file].weights
        for name, theirs in names.items():
            path, p = kept[name]
            x = _transpose(path, weights.get_tensor(theirs)).astype(p.get_value().dtype)
            flat.append((path, p.replace(_place(x, everywhere))))
    nnx.update(model, nnx.from_flat_state(flat))
    return model


def save_folder(
    model: RingTransformer,
    folder: str | Path,
    files: Callable[[TransformerConfig], dict[str, bytes]],
    renamed: Callable[[str], str],
) -> None:
    """Save the weights of ``model`` and ``files(config)`` ({name: bytes}) in ``folder``. Each process must call it."""
    from safetensors.numpy import save_file

    arrays: dict[str, Any] = {}
    beside: dict[str, bytes] = {}

    def check() -> None:
        beside.update(files(transformer_in(model).config))
        arrays.update({name: p.get_value() for name, (_, p) in _parameters(model).items()})
        for name, x in arrays.items():
            check_savable(name, str(x.dtype), valued=isinstance(x, jax.Array | np.ndarray))
            check_exists(name, x)
        expected = nnx.eval_shape(lambda: RingTransformer.from_config(model.config, rngs=nnx.Rngs(0)))
        shapes = [{name: _shape(*each) for name, each in _parameters(module).items()} for module in (expected, model)]
        check_state(shapes[0], shapes[1], most=8)

    def saved() -> None:
        weights, error = _whole(model), None
        if jax.process_index() == 0:
            try:
                with replacing(folder, beside) as new:
                    for name, content in beside.items():
                        (new / name).write_bytes(content)
                    write(new, ((renamed(name), x) for name, x in weights), save_file)
            except Exception as objection:
                error = objection
        for _ in weights:  # processes that do not write, or failed halfway, still join the gathers
            pass
        if error is not None:
            raise error

    run_on_all(check)
    check_kinds(arrays)
    run_on_all(saved)


def transformer_in(model: RingTransformer) -> RingTransformer:
    if not isinstance(model, RingTransformer):
        raise ValueError(f"weights are saved of a RingTransformer, got {type(model).__name__}")
    return model


def _whole(model: RingTransformer) -> Iterator[tuple[str, np.ndarray]]:
    for name, (path, p) in _parameters(model).items():
        yield name, np.ascontiguousarray(_transpose(path, gather_to_host(p[...])))


def _shape(path: tuple[Any, ...], p: nnx.Variable) -> tuple[int, ...]:
    """Return the shape of a weight in a file. A file holds a flax kernel [in, out] as [out, in], so its shape is reversed."""
    shape = tuple(p.get_value().shape)
    return shape[::-1] if path[-1] == "kernel" else shape


def _place(x: np.ndarray, sharding: jax.NamedSharding | None) -> jax.Array:
    """Return ``x`` as a JAX array with ``sharding``, which may span several processes; for None, on the default device."""
    return jnp.asarray(x) if sharding is None else jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
