"""A training run in JAX: one program on devices of one or several processes. Imported only if JAX is used."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ring_attn_core.model.progress import ResumePoint
from ring_attn_jax import (
    Checkpoints,
    RingTransformer,
    SequenceShardedDataset,
    Shard,
    TracedLayout,
    check_ranks,
    count_labels,
    from_numpy,
    load_llama,
    load_weights,
    loss,
    save_weights,
    shard_batch,
    to_numpy,
)
from ring_attn_jax.training.lora import add_adapters, merge_adapters, save_adapters

from ..processes import hold_interrupts
from .arithmetic import first_adapters, first_weights
from .config import DTYPES, Config
from .data import arguments, check_vocab, is_llama
from .folder import adapters_of
from .jax_mesh import AXES, mesh_of, place, weight_shardings
from .jax_optimizer import adamw, compiler_options
from .loop import Tell, train
from .side import RunDevices, TrainStep

MOST_BYTES = 4096
"""Size of the text that process 0 broadcasts, in bytes; a longer text is cut."""


def run(config: Config, tell: Tell) -> None:
    """Train on accelerators if there are enough for all ranks, else on CPU devices. Only process 0 tells each line of the log."""
    if "float64" in [config.model.get(name) for name in DTYPES]:
        jax.config.update("jax_enable_x64", True)
    side = JaxSide(config, mesh_of(config))
    try:
        train(config, side, tell)
    except BaseException:
        if jax.process_count() == 1:
            side.close()
        raise


def joined(coordinator: str, processes: int | None, process: int | None) -> None:
    """Join the JAX program as ``process`` of ``processes``. With ``coordinator`` "auto", the launcher sets both numbers."""
    jax.distributed.initialize(None if coordinator == "auto" else coordinator, processes, process)


def on_cpus(config: Config, processes: int | None) -> None:
    """Split the CPU into ranks x replicas // ``processes`` devices, at least 1; None: do nothing, only the launcher knows it."""
    if processes is not None:
        jax.config.update("jax_num_cpu_devices", max(1, config.ring.ranks * config.ring.replicas // processes))


def is_first() -> bool:
    """Return True in process 0 of the JAX program."""
    return jax.process_index() == 0


def of_first(words: str) -> str:
    """Return the ``words`` of process 0 in every process, cut to ``MOST_BYTES`` bytes if there are several processes."""
    if jax.process_count() == 1:
        return words
    sent = np.frombuffer(words.encode(errors="replace")[:MOST_BYTES].ljust(MOST_BYTES), np.uint8)
    sent = np.asarray(multihost_utils.broadcast_one_to_all(sent))
    return sent.astype(np.uint8).tobytes().decode(errors="ignore").rstrip()


class Batch(NamedTuple):
    """Stacked microbatches [microbatch, rows, tokens, ...] in layout order. ``layout``: the stacked balanced layouts, or None."""

    ids: Any
    labels: Any
    positions: Any
    extents: Any
    layout: TracedLayout | None


class StaticArguments(NamedTuple):
    """The static arguments of a compiled function.
    ``sharded``: weights are sharded over all devices. ``chunk``: tokens whose logits a rank holds at a time. ``length``: tokens
    of a row. ``rows``: rows of a microbatch."""

    mesh: Mesh
    sharded: bool
    chunk: int
    length: int
    rows: int


class JaxTrainer:
    """The model and the optimizer of a run in JAX over a mesh.
    A step donates their arrays, so that XLA may reuse their memory."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self._config, self._mesh = config, mesh
        self._sharded = config.ring.weights == "sharded"
        self._model = self._made()
        place(self._model, mesh, self._sharded)  # as a step returns them, so that step 2 does not recompile
        self.config = self._model.config
        trained = nnx.Param if config.lora is None else nnx.LoRAParam  # a LoRAParam is a Param too
        count = lambda kind: sum(x.size for x in jax.tree.leaves(nnx.state(self._model, kind)))
        self.parameters, self.trained = count(nnx.Param), count(trained)
        self._optimizer = nnx.Optimizer(self._model, adamw(config.optimizer, config.steps), wrt=trained)
        place(self._optimizer, mesh, self._sharded)
        options = compiler_options(mesh.devices.flat[0].platform, config.ring.activations)
        self._step = jax.jit(_step, static_argnames=("graph", "how"), donate_argnames="state", compiler_options=options)

    def _made(self) -> RingTransformer:
        """Load the model from ``init_from`` if set, else draw weights by ``first_weights``. Add adapters if ``lora`` is set."""
        of, folder = self._config.ring, self._config.init_from
        how: dict[str, Any] = {"layout": of.model_layout, "backend": of.backend, "strategy": of.strategy}
        how |= {"activations": of.activations, "mesh": self._mesh, "batch_axes": "data"}
        with jax.default_device(jax.local_devices(backend="cpu")[0] if self._sharded else None):
            if folder is not None:
                arguments = dict(self._config.model)
                load = load_llama if is_llama(folder) else load_weights
                model = load(folder, dtype=arguments.get("param_dtype"), compute_dtype=arguments.get("compute_dtype"), **how)
            else:
                model = RingTransformer.from_config(self._config.transformer(), **how, rngs=nnx.Rngs(0))
                from_numpy(model, first_weights(to_numpy(model), self._config.seed))
            if self._config.lora is not None:
                add_adapters(model, self._config.lora, first_adapters(self._config.lora, model.config, self._config.seed))
            return model

    def shard(self, ids: list[list[int]], labels: list[list[int]]) -> Shard:
        whole, targets, of = jnp.asarray(ids), jnp.asarray(labels), self._config.ring
        return shard_batch(whole, of.layout, of.ranks, labels=targets, documents=jnp.zeros_like(whole))

    def step(self, number: int, microbatches: list[Shard]) -> TrainStep:
        seed = jnp.asarray(self._config.seed + number)
        graph, state = nnx.split(both := (self._model, self._optimizer))
        value, norm, state = self._step(graph, state, self._placed(microbatches), seed, self._how(microbatches[0]))
        nnx.update(both, state)
        return TrainStep(float(value), float(norm))

    def losses(self, microbatch: Shard, ends: list[int]) -> Iterator[tuple[float, int]]:
        sums, counts = _losses(*nnx.split(self._model), self._placed([microbatch]), tuple(ends), self._how(microbatch))
        return zip(np.asarray(sums).tolist(), np.asarray(counts).tolist(), strict=True)

    def wrong(self, microbatch: Shard) -> list[int]:
        labels = np.asarray(microbatch.labels)
        rows, tokens = np.nonzero(labels != -100)
        best = _best(*nnx.split(self._model), self._placed([microbatch]), (rows, tokens), self._how(microbatch))
        missed = np.asarray(best) != labels[rows, tokens]
        return np.bincount(rows, missed, len(labels)).astype(int).tolist()

    def machine(self) -> RunDevices:
        device = jax.local_devices()[0] if self._mesh.size > 1 else self._mesh.local_devices[0]
        stats = None if device.platform == "cpu" else device.memory_stats()
        if stats:
            return RunDevices(device.device_kind, self._mesh.size, stats["peak_bytes_in_use"])
        unit = 1 if sys.platform == "darwin" else 1024
        return RunDevices(device.device_kind, self._mesh.size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)

    def _how(self, of: Shard) -> StaticArguments:
        return StaticArguments(self._mesh, self._sharded, self._config.ring.chunk, of.length, self._config.rows)

    def _placed(self, microbatches: list[Shard]) -> Batch:
        """Put the microbatches on the devices of the mesh; each process fills its own devices."""

        def placed(spec: PartitionSpec, *leaves: jax.Array) -> jax.Array:
            whole = np.stack(list(map(np.asarray, leaves)))
            return jax.make_array_from_callback(whole.shape, NamedSharding(self._mesh, spec), lambda index: whole[index])

        layouts = [None if shard.layout is None else TracedLayout.of(shard.layout) for shard in microbatches]
        tokens: Any = jax.tree.map(partial(placed, PartitionSpec(None, *AXES)), *[shard[:4] for shard in microbatches])
        return Batch._make([*tokens, jax.tree.map(partial(placed, PartitionSpec()), *layouts)])


class JaxSide(JaxTrainer):
    """The ``Side`` of a run in JAX: a trainer with its data and checkpoints."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.first = is_first()
        self.data, self.held_out = (
            SequenceShardedDataset(**arguments(config, held_out), rank=None, batch_size=config.rows, epochs=None)
            for held_out in (False, True)
        )
        check_ranks({"data": self.data.state(), "held out": self.held_out.state()})
        super().__init__(config, mesh)
        check_vocab(self.data.vocab, self.config.vocab)
        self._checkpoints = Checkpoints(Path(config.out, "checkpoints"), keep=config.keep)

    def resume(self) -> ResumePoint | None:
        """Load the newest checkpoint, if there is one. Before the load, delete the initial weights and moments to save memory."""
        if self._checkpoints.steps():
            for x in jax.tree.leaves(nnx.state((self._model, self._optimizer))):
                x.delete()
        return self._checkpoints.resume(self._model, self._optimizer)

    def save(self, step: int, data: str) -> None:
        with hold_interrupts():  # else orbax's threads may outlive the run that has started them
            self._checkpoints.save(step, self._model, self._optimizer, data=data, more=adapters_of(self._config))

    def close(self) -> None:
        """Wait for a save in progress, and ignore its OSError. Only then may the folder be unlocked for another run."""
        with suppress(OSError):
            self._checkpoints.close()

    def finish(self) -> None:
        self._checkpoints.close()
        out, lora = Path(self._config.out), self._config.lora
        if lora is not None:
            save_adapters(self._model, lora, out / "adapters", self._config.init_from)
            merge_adapters(self._model)
        save_weights(self._model, out / "weights")


def _step(graph: Any, state: Any, batch: Batch, seed: jax.Array, how: StaticArguments) -> tuple[Any, Any, Any]:
    """Run one optimizer step and return the loss, the gradient norm, and the new state of model and optimizer.
    It is compiled by ``jax.jit``, because ``nnx.jit`` does not take compiler options."""
    model, optimizer = nnx.merge(graph, state)
    structure, weights, frozen = nnx.split(model, optimizer.wrt, ...)
    total = jnp.maximum(count_labels(batch.labels, axis_name=None), 1)
    kind = jnp.promote_types(model.config.param_dtype, jnp.float32)

    def objective(weights: Any, number: jax.Array, microbatch: Batch) -> jax.Array:
        whole = nnx.merge(structure, weights, frozen)
        hidden = _hidden(whole, microbatch, how, seed if model.config.dropout_rate else None, number * how.rows)
        return (_loss(whole, hidden, microbatch.labels, how) / total).astype(kind)

    def add(sums: Any, each: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(objective)(weights, *each)), None

    nothing = jnp.zeros((), kind), jax.tree.map(jnp.zeros_like, weights)
    (value, gradients), _ = jax.lax.scan(add, nothing, (jnp.arange(len(batch.ids)), batch))
    norm = optax.tree.norm(gradients)
    optimizer.update(model, gradients)
    state = nnx.state((model, optimizer))
    if how.sharded:
        state = jax.lax.with_sharding_constraint(state, weight_shardings(state, how.mesh, True))
    return value, norm, state


@partial(jax.jit, static_argnames=("graph", "ends", "how"))  # nnx.jit would return a copy of the weights
def _losses(graph: Any, state: Any, batch: Batch, ends: tuple[int, ...], how: StaticArguments) -> tuple[jax.Array, jax.Array]:
    model, one = nnx.merge(graph, state), jax.tree.map(lambda x: x[0], batch)
    hidden, before = _hidden(model, one, how), one.positions - one.extents[..., 0]
    sums, counts = [], []
    for begin, end in zip((0, *ends), ends, strict=False):
        labels = jnp.where((begin <= before) & (before < end), one.labels, -100)
        sums.append(_loss(model, hidden, labels, how))
        counts.append(count_labels(labels, axis_name=None))
    return jnp.stack(sums), jnp.stack(counts)


@partial(jax.jit, static_argnames=("graph", "how"))
def _best(graph: Any, state: Any, batch: Batch, where: tuple[Any, Any], how: StaticArguments) -> jax.Array:
    model = nnx.merge(graph, state)
    hidden = _hidden(model, jax.tree.map(lambda x: x[0], batch), how)[where]
    best = (hidden @ model.head_weight.astype(hidden.dtype).T).argmax(-1)
    return jax.lax.with_sharding_constraint(best, NamedSharding(how.mesh, PartitionSpec()))  # replicated for all processes


def _hidden(model: RingTransformer, batch: Batch, how: StaticArguments, seed: jax.Array | None = None, row: Any = 0) -> jax.Array:
    """Return the last hidden states. Apply dropout only with a ``seed``. ``row``: the number of the optimizer step's rows before
    this microbatch; it offsets the dropout mask."""
    inputs, masks = (batch.ids, batch.positions, how.length), {"extents": batch.extents, "layout": batch.layout}
    return model(*inputs, **masks, dropout_seed=seed, dropout_offset=(row, 0), return_hidden=True)


def _loss(model: RingTransformer, hidden: jax.Array, labels: jax.Array, how: StaticArguments) -> jax.Array:
    """Return the loss summed over all labels, computed in chunks of tokens."""
    where: dict[str, Any] = {"axis_name": "seq", "mesh": how.mesh, "batch_axes": "data"}
    return loss(hidden, labels, head=model.head_weight, chunk=how.chunk, reduction="sum", **where)
