"""A training run in JAX: one program on devices of one or several processes. Imported only if JAX is used."""

from __future__ import annotations

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

import ring_attn_jax
from ring_attn_core.model.progress import ResumePoint
from ring_attn_jax import (
    Checkpoints,
    RingTransformer,
    SequenceShardedDataset,
    Shard,
    TracedLayout,
    TransformerConfig,
    check_ranks,
    count_labels,
    loss,
    shard_batch,
)
from ring_attn_jax.training import lora  # noqa: F401  # data.py takes it from the package

from ..processes import hold_interrupts
from .arithmetic import rates
from .config import DTYPES, Config
from .data import build_model, check_vocab, dataset_arguments, save_model
from .folder import CHECKPOINTS, extract_lora
from .jax_mesh import AXES, make_mesh, place, weight_shardings
from .loop import RunDevices, Tell, TrainStep, measure_process, train

MAX_BYTES = 4096
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
"""The XLA option of a scheduler that would keep offloaded activations on the GPU (docs/checkpointing.md)."""


def run(config: Config, tell: Tell) -> None:
    """Train on accelerators if there are enough for all ranks, else on CPU devices. Only process 0 tells each line of the log."""
    if "float64" in [config.model.get(name) for name in DTYPES]:
        jax.config.update("jax_enable_x64", True)
    trainer = JaxTrainer(config, make_mesh(config))
    try:
        train(config, trainer, tell)
    except BaseException:
        if jax.process_count() == 1:
            trainer.close()
        raise


def join(coordinator: str, processes: int | None, process: int | None) -> None:
    """Join the JAX program as ``process`` of ``processes``. With ``coordinator`` "auto", the launcher sets both numbers."""
    jax.distributed.initialize(None if coordinator == "auto" else coordinator, processes, process)


def split_cpu(config: Config, processes: int | None) -> None:
    """Split the CPU into ranks x replicas // ``processes`` devices, at least 1; None: do nothing, only the launcher knows it."""
    if processes is not None:
        jax.config.update("jax_num_cpu_devices", max(1, config.ring.ranks * config.ring.replicas // processes))


def is_first() -> bool:
    return jax.process_index() == 0


def share_text(words: str) -> str:
    """Return the ``words`` of process 0 in every process, cut to ``MAX_BYTES`` bytes if there are several processes."""
    if jax.process_count() == 1:
        return words
    sent = np.frombuffer(words.encode(errors="replace")[:MAX_BYTES].ljust(MAX_BYTES), np.uint8)
    sent = np.asarray(multihost_utils.broadcast_one_to_all(sent))
    return sent.astype(np.uint8).tobytes().decode(errors="ignore").rstrip()


class Stack(NamedTuple):
    """Stacked microbatches [microbatch, rows, tokens, ...] in layout order. ``layout``: the stacked balanced layouts, or None."""

    ids: Any
    labels: Any
    positions: Any
    extents: Any
    layout: TracedLayout | None


class StaticArguments(NamedTuple):
    """The static arguments of a compiled function.
    ``sharded``: weights are sharded over all devices. ``chunk``: tokens whose logits a rank holds at a time. ``order``: of sums
    over tokens. ``length``: tokens of a row. ``rows``: rows of a microbatch."""

    mesh: Mesh
    sharded: bool
    chunk: int
    order: str
    length: int
    rows: int


def _zeros(config: TransformerConfig, mesh: Mesh, **options: Any) -> RingTransformer:
    """Return a model with weights of 0. To draw them, JAX would compile several programs for each shape."""
    model = nnx.eval_shape(lambda: RingTransformer.from_config(config, mesh=mesh, **options, rngs=nnx.Rngs(0)))
    nnx.update(model, jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), nnx.state(model)))
    return model


class JaxTrainer:
    """The ``Trainer`` of a run in JAX over a mesh. A step donates the arrays of model and optimizer to XLA."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.first = is_first()
        self._config, self._mesh = config, mesh
        self._sharded = config.ring.weights == "sharded"
        with jax.default_device(jax.local_devices(backend="cpu")[0] if self._sharded else None):
            self._model: RingTransformer = build_model(config, ring_attn_jax, _zeros, mesh=mesh, batch_axes="data")
        place(self._model, mesh, self._sharded)  # as a step returns them, so that step 2 does not recompile
        self.model_config = self._model.config
        trained = nnx.Param if config.lora is None else nnx.LoRAParam  # a LoRAParam is a Param too
        self.parameters, self.trained = (
            sum(x.size for x in jax.tree.leaves(nnx.state(self._model, kind))) for kind in (nnx.Param, trained)
        )
        self._optimizer = nnx.Optimizer(self._model, adamw(config), wrt=trained)
        place(self._optimizer, mesh, self._sharded)
        options = compiler_options(mesh.devices.flat[0].platform, config.ring.activations)
        self._step = jax.jit(_step, static_argnames=("graph", "static"), donate_argnames="state", compiler_options=options)

    def open(self) -> None:
        config = self._config
        self.data, self.held_out = (
            SequenceShardedDataset(**dataset_arguments(config, held_out), rank=None, batch_size=config.rows)
            for held_out in (False, True)
        )
        check_ranks({"data": self.data.state(), "held out": self.held_out.state()})
        check_vocab(self.data.vocab, self.model_config.vocab)
        self._checkpoints = Checkpoints(Path(config.out, CHECKPOINTS), keep=config.keep)

    def resume(self) -> ResumePoint | None:
        """Load the newest checkpoint, if there is one. Before the load, delete the initial weights and moments to save memory."""
        if self._checkpoints.steps():
            for x in jax.tree.leaves(nnx.state((self._model, self._optimizer))):
                x.delete()
        return self._checkpoints.resume(self._model, self._optimizer)

    def save(self, step: int, data: str) -> None:
        with hold_interrupts():  # else orbax's threads may outlive the run that has started them
            self._checkpoints.save(step, self._model, self._optimizer, data=data, more=extract_lora(self._config))

    def close(self) -> None:
        """Wait for a save in progress, and ignore its OSError. Only then may the folder be unlocked for another run."""
        if hasattr(self, "_checkpoints"):
            with suppress(OSError):
                self._checkpoints.close()

    def finish(self) -> None:
        self._checkpoints.close()
        save_model(self._config, ring_attn_jax, self._model)

    def shard(self, ids: list[list[int]], labels: list[list[int]]) -> Shard:
        tokens, ring = jnp.asarray(ids), self._config.ring
        return shard_batch(tokens, ring.layout, ring.ranks, labels=jnp.asarray(labels), documents=jnp.zeros_like(tokens))

    def step(self, number: int, microbatches: list[Shard]) -> TrainStep:
        seed = jnp.asarray(self._config.seed + number)
        graph, state = nnx.split(both := (self._model, self._optimizer))
        value, norm, state = self._step(graph, state, self._place(microbatches), seed, self._static(microbatches[0]))
        nnx.update(both, state)
        return TrainStep(float(value), float(norm))

    def losses(self, microbatch: Shard, ends: list[int]) -> Iterator[tuple[float, int]]:
        batch, static = self._place([microbatch]), self._static(microbatch)
        sums, counts = _losses(*nnx.split(self._model), batch, tuple(ends), static)
        return zip(np.asarray(sums).tolist(), np.asarray(counts).tolist(), strict=True)

    def wrong(self, microbatch: Shard) -> list[int]:
        labels = np.asarray(microbatch.labels)
        rows, tokens = np.nonzero(labels != -100)
        best = _best(*nnx.split(self._model), self._place([microbatch]), (rows, tokens), self._static(microbatch))
        missed = np.asarray(best) != labels[rows, tokens]
        return np.bincount(rows, missed, len(labels)).astype(int).tolist()

    def machine(self) -> RunDevices:
        device = jax.local_devices()[0] if self._mesh.size > 1 else self._mesh.local_devices[0]
        stats = None if device.platform == "cpu" else device.memory_stats()
        return RunDevices(device.device_kind, self._mesh.size, stats["peak_bytes_in_use"] if stats else measure_process())

    def _static(self, shard: Shard) -> StaticArguments:
        length = shard.length if shard.layout is None else int(shard.length)  # a ShardLength would compile for each layout
        return StaticArguments(
            self._mesh, self._sharded, self._config.ring.chunk, self._config.ring.order, length, self._config.rows
        )

    def _place(self, microbatches: list[Shard]) -> Stack:
        """Put the microbatches on the devices of the mesh; each process fills its own devices."""

        def put(spec: PartitionSpec, *leaves: jax.Array) -> jax.Array:
            stacked = np.stack(list(map(np.asarray, leaves)))
            return jax.make_array_from_callback(stacked.shape, NamedSharding(self._mesh, spec), lambda index: stacked[index])

        layouts = [None if shard.layout is None else TracedLayout.of(shard.layout) for shard in microbatches]
        tokens: Any = jax.tree.map(partial(put, PartitionSpec(None, *AXES)), *[shard[:4] for shard in microbatches])
        return Stack._make([*tokens, jax.tree.map(partial(put, PartitionSpec()), *layouts)])


def adamw(config: Config) -> optax.GradientTransformation:
    """Return AdamW with clipping by the global norm and ``arithmetic.rates``. Vectors, such as norms, have no weight decay."""
    settings, table = config.optimizer, np.array(rates(config.optimizer, config.steps))
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.scale_by_adam(settings.beta1, settings.beta2, settings.eps),
        optax.add_decayed_weights(settings.decay, mask=lambda weights: jax.tree.map(lambda x: x.ndim > 1, weights)),
        optax.scale_by_learning_rate(lambda count: jnp.asarray(table)[count]),
    )


def compiler_options(platform: str, activations: str) -> dict[str, bool] | None:
    """Return the XLA options of a training step, or None: ``SCHEDULER`` is off on a GPU if activations are offloaded."""
    return {SCHEDULER: False} if platform == "gpu" and activations == "offload" else None


def _step(graph: Any, state: Any, batch: Stack, seed: jax.Array, static: StaticArguments) -> tuple[Any, Any, Any]:
    """Return an optimizer step's loss, gradient norm and new state, for ``jax.jit``: ``nnx.jit`` takes no compiler options."""
    model, optimizer = nnx.merge(graph, state)
    structure, weights, frozen = nnx.split(model, optimizer.wrt, ...)
    total = jnp.maximum(count_labels(batch.labels, axis_name=None), 1)
    kind = jnp.promote_types(model.config.param_dtype, jnp.float32)

    def objective(weights: Any, number: jax.Array, microbatch: Stack) -> jax.Array:
        merged = nnx.merge(structure, weights, frozen)
        hidden = _last_hidden(merged, microbatch, static, seed if model.config.dropout_rate else None, number * static.rows)
        return (_loss(merged, hidden, microbatch.labels, static) / total).astype(kind)

    def add(sums: Any, each: tuple[jax.Array, Stack]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(objective)(weights, *each)), None

    nothing = jnp.zeros((), kind), jax.tree.map(jnp.zeros_like, weights)
    (value, gradients), _ = jax.lax.scan(add, nothing, (jnp.arange(len(batch.ids)), batch))
    norm = optax.tree.norm(gradients)
    optimizer.update(model, gradients)
    state = nnx.state((model, optimizer))
    if static.sharded:
        state = jax.lax.with_sharding_constraint(state, weight_shardings(state, static.mesh, True))
    return value, norm, state


@partial(jax.jit, static_argnames=("graph", "ends", "static"))  # nnx.jit would return a copy of the weights
def _losses(graph: Any, state: Any, batch: Stack, ends: tuple[int, ...], static: StaticArguments) -> tuple[jax.Array, jax.Array]:
    model, one = nnx.merge(graph, state), jax.tree.map(lambda x: x[0], batch)
    hidden, before = _last_hidden(model, one, static), one.positions - one.extents[..., 0]
    sums, counts = [], []
    for begin, end in zip((0, *ends), ends, strict=False):
        labels = jnp.where((begin <= before) & (before < end), one.labels, -100)
        sums.append(_loss(model, hidden, labels, static))
        counts.append(count_labels(labels, axis_name=None))
    return jnp.stack(sums), jnp.stack(counts)


@partial(jax.jit, static_argnames=("graph", "static"))
def _best(graph: Any, state: Any, batch: Stack, where: tuple[Any, Any], static: StaticArguments) -> jax.Array:
    model = nnx.merge(graph, state)
    hidden = _last_hidden(model, jax.tree.map(lambda x: x[0], batch), static)[where]
    best = (hidden @ model.head_weight.astype(hidden.dtype).T).argmax(-1)
    return jax.lax.with_sharding_constraint(best, NamedSharding(static.mesh, PartitionSpec()))  # replicated for all processes


def _last_hidden(
    model: RingTransformer, batch: Stack, static: StaticArguments, seed: jax.Array | None = None, row: Any = 0
) -> jax.Array:
    """Return the last hidden states. Dropout needs a ``seed``, and masks by ``row``, the step's rows before this microbatch."""
    inputs, masks = (batch.ids, batch.positions, static.length), {"extents": batch.extents, "layout": batch.layout}
    return model(*inputs, **masks, dropout_seed=seed, dropout_offset=(row, 0), return_hidden=True)


def _loss(model: RingTransformer, hidden: jax.Array, labels: jax.Array, static: StaticArguments) -> jax.Array:
    ring: dict[str, Any] = {"axis_name": "seq", "mesh": static.mesh, "batch_axes": "data"}
    return loss(hidden, labels, head=model.head_weight, chunk=static.chunk, order=static.order, reduction="sum", **ring)
