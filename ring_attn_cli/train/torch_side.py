"""A training run in PyTorch, one process per rank. Imported only if PyTorch is used."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import get_node_local_rank

from ring_attn_core.model.progress import ResumePoint
from ring_attn_torch import (
    Checkpoints,
    RingTransformer,
    SequenceShardedDataset,
    Shard,
    check_ranks,
    count_labels,
    from_numpy,
    load_llama,
    load_weights,
    loss,
    save_weights,
    shard_batch,
    sum_gradients,
    to_numpy,
)
from ring_attn_torch.training.lora import add_adapters, merge_adapters, save_adapters

from ..processes import Report
from . import lock
from .arithmetic import first_adapters, first_weights, rates
from .config import Config
from .data import arguments, check_vocab, is_llama
from .folder import adapters_of
from .loop import Tell, train
from .side import RunDevices, TrainStep
from .torch_ranks import CPU, device_of, join_launched, member, reported_errors


def work(report: Report, rank: int, config: Config, store: str) -> None:
    """Train as one rank that ``ring-attn train`` started; rank 0 reports the log. ``store``: file by which the ranks meet."""
    ranks = config.ring.ranks * config.ring.replicas
    device = device_of(rank, ranks)
    if device.type == "cpu":
        torch.set_num_threads(1)
    with member(device, rank, ranks, store), reported_errors(report):
        run(config, report, device)


def launched(config: Config, tell: Tell) -> None:
    """Train as one rank, in a process that torchrun started. ``tell`` gets each line of the log on rank 0."""
    rank = get_node_local_rank(0)
    if torch.cuda.is_available() and torch.cuda.device_count() <= rank:
        raise ValueError(
            f"torchrun has started more processes here than the {torch.cuda.device_count()} GPUs that they see: start one for "
            "each GPU, or hide all of them (CUDA_VISIBLE_DEVICES=) to run on the CPU"
        )
    device = device_of(rank, rank + 1)
    join_launched(device)
    try:
        ranks = config.ring.ranks * config.ring.replicas
        if dist.get_world_size() != ranks:
            raise ValueError(
                f"torchrun has started {dist.get_world_size()} processes, and the config has {config.ring.ranks} ranks x "
                f"{config.ring.replicas} replicas = {ranks}: start {ranks}, or change [ring]"
            )
        with lock.held(config, dist.get_rank() == 0, of_first):
            run(config, tell, device)
    finally:
        dist.destroy_process_group()


def of_first(words: str, group: dist.ProcessGroup | None = None) -> str:
    """Broadcast the text ``words`` of rank 0 to all ranks, and return it."""
    sent = [words]
    dist.broadcast_object_list(sent, 0, group)
    return sent[0]


def is_first() -> bool:
    """Return True if this process is torchrun's first on this machine, or if torchrun did not start it."""
    return get_node_local_rank(0) == 0


def run(config: Config, tell: Tell, device: torch.device) -> None:
    """Train as one of the ranks of the default group. ``tell`` gets each line of the log on rank 0."""
    ring, replicas = config.ring.ranks, config.ring.replicas
    mesh = init_device_mesh(device.type, (replicas, ring), mesh_dim_names=("data", "seq"))
    places = RankPlace(mesh.get_group("seq"), dist.group.WORLD, mesh.get_local_rank("data"), device)
    train(config, TorchSide(config, places), tell if dist.get_rank() == 0 else lambda kind, values: None)


class RankPlace(NamedTuple):
    """A rank's process groups (its ring, and all ranks), the index of its replica, and its device."""

    ring: Any
    everybody: Any
    replica: int
    device: torch.device


def shard_weights(model: RingTransformer, places: RankPlace) -> RingTransformer:
    """Shard the weights over all ranks by FSDP2, block by block, which moves each block to the device.
    It averages gradients over the ranks, and ``sum_gradients`` multiplies the mean by the number of ranks."""
    from torch.distributed.fsdp import FSDPModule, fully_shard  # takes a second to import

    mesh = DeviceMesh.from_group(places.everybody, places.device.type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(places.device.type == "cpu")  # gloo has no mean
    return model


class TorchTrainer:
    """The model and the optimizer of one rank of a run in PyTorch, with the computations of training and evaluation."""

    def __init__(self, config: Config, places: RankPlace) -> None:
        self._config, self._places = config, places
        self._sharded = config.ring.weights == "sharded"
        self._rank = dist.get_rank(places.ring)
        self._model = self._made()
        self.config = self._model.config
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self.parameters, self.trained = (sum(p.numel() for p in each) for each in (self._model.parameters(), trained))
        of = config.optimizer
        matrices, vectors = ([p for p in trained if (p.ndim > 1) == many] for many in (True, False))
        groups = [{"params": matrices, "weight_decay": of.decay}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, of.learning_rate, (of.beta1, of.beta2), of.eps)
        self._rates = rates(of, config.steps)

    def _made(self) -> RingTransformer:
        """Load the model from ``init_from`` if set, else draw weights by ``first_weights``. Add adapters if ``lora`` is set."""
        of, folder = self._config.ring, self._config.init_from
        how: dict[str, Any] = {"layout": of.model_layout, "backend": of.backend, "strategy": of.strategy}
        how |= {"activations": of.activations, "group": self._places.ring}
        with CPU if self._sharded else self._places.device:
            if folder is not None:
                arguments = dict(self._config.model)
                load = load_llama if is_llama(folder) else load_weights
                model = load(folder, dtype=arguments.get("param_dtype"), compute_dtype=arguments.get("compute_dtype"), **how)
            else:
                model = RingTransformer.from_config(self._config.transformer(), **how)
                from_numpy(model, first_weights(to_numpy(model), self._config.seed))
            if self._config.lora is not None:
                add_adapters(model, self._config.lora, first_adapters(self._config.lora, model.config, self._config.seed))
        return shard_weights(model, self._places) if self._sharded else model

    def shard(self, ids: list[list[int]], labels: list[list[int]]) -> Shard:
        size = self._config.data.batch_size
        mine = slice(self._places.replica * size, (self._places.replica + 1) * size)
        whole, targets = torch.tensor(ids[mine]), torch.tensor(labels[mine])
        of = self._config.ring
        return shard_batch(whole, of.layout, of.ranks, self._rank, labels=targets, documents=torch.zeros_like(whole))

    def step(self, number: int, microbatches: list[Shard]) -> TrainStep:
        microbatches = list(map(self._placed, microbatches))
        total = sum(count_labels(shard.labels, group=self._places.everybody) for shard in microbatches)
        assert isinstance(total, Tensor)
        self._optimizer.zero_grad()
        value = torch.zeros((), device=self._places.device)
        for i, shard in enumerate(microbatches):
            part = self._loss(self._hidden(shard, number, i), shard.labels) / total.clamp(min=1)
            part.backward()
            value = value + part.detach()
        sum_gradients(self._model, self._places.everybody)
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if self._sharded else norm
        # Clip as optax does: torch's clip_grad_norm_ adds 1e-6 to the norm, which gives another step.
        factor = torch.clamp(self._config.optimizer.clip / norm, max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rates[number]
        self._optimizer.step()
        return TrainStep(value.item(), norm.item())

    @torch.no_grad()
    def losses(self, microbatch: Shard, ends: list[int]) -> Iterator[tuple[float, int]]:
        shard = self._placed(microbatch)
        hidden = self._hidden(shard)
        assert shard.extents is not None
        before, begin = shard.positions - shard.extents[..., 0], 0
        for end in ends:
            labels = torch.where((begin <= before) & (before < end), shard.labels, -100)
            count = count_labels(labels, group=self._places.everybody)
            yield self._loss(hidden, labels).item(), int(count)
            begin = end

    @torch.no_grad()
    def wrong(self, microbatch: Shard) -> list[int]:
        shard = self._placed(microbatch)
        of, size = self._places, self._config.data.batch_size
        missed = torch.zeros(self._config.rows, dtype=torch.int64, device=of.device)
        rows, tokens = (shard.labels != -100).nonzero(as_tuple=True)
        hidden = self._hidden(shard)[rows, tokens]
        best = (hidden @ self._model.head_weight.to(hidden.dtype).T).argmax(-1)
        missed.index_add_(0, rows + of.replica * size, (best != shard.labels[rows, tokens]).long())
        dist.all_reduce(missed, group=of.everybody)
        return missed.tolist()

    def machine(self) -> RunDevices:
        ranks, device = dist.get_world_size(self._places.everybody), self._places.device
        if device.type == "cuda":
            return RunDevices(torch.cuda.get_device_name(device), ranks, torch.cuda.max_memory_allocated(device))
        unit = 1 if sys.platform == "darwin" else 1024
        return RunDevices("cpu", ranks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)

    def _hidden(self, shard: Shard, step: int | None = None, microbatch: int = 0) -> Tensor:
        """Return a shard's last hidden states [rows, local tokens, dim].
        Apply the model's dropout only if ``step`` is passed. No two rows of a step share a mask: the seed is the run's plus
        ``step``, the offset is the rank's first row among all of the step."""
        row = microbatch * self._config.rows + self._places.replica * self._config.data.batch_size
        seed = None if step is None or not self.config.dropout_rate else self._config.seed + step
        inputs = shard.ids, shard.positions, shard.length
        masks: dict[str, Any] = {"extents": shard.extents, "layout": shard.layout}
        return self._model(*inputs, **masks, dropout_seed=seed, dropout_offset=(row, 0), return_hidden=True)

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over the labels of all ranks, computed in chunks of tokens."""
        head, chunk = self._model.head_weight, self._config.ring.chunk
        return loss(hidden, labels, head=head, chunk=chunk, reduction="sum", group=self._places.everybody)

    def _placed(self, shard: Shard) -> Shard:
        there = self._places.device
        extents = None if shard.extents is None else shard.extents.to(there)
        ids, labels, positions = shard.ids.to(there), shard.labels.to(there), shard.positions.to(there)
        return shard._replace(ids=ids, labels=labels, positions=positions, extents=extents)


class TorchSide(TorchTrainer):
    """The ``Side`` of one rank of a run in PyTorch: a trainer with its data and checkpoints."""

    def __init__(self, config: Config, places: RankPlace) -> None:
        ring, everybody, replica, _ = places
        self.first = dist.get_rank(everybody) == 0
        self.data, self.held_out = (
            SequenceShardedDataset(
                **arguments(config, held_out),
                rank=dist.get_rank(ring),
                batch_size=config.data.batch_size,
                replicas=config.ring.replicas,
                replica=replica,
                epochs=None,
            )
            for held_out in (False, True)
        )
        check_ranks({"data": self.data.state(), "held out": self.held_out.state()}, everybody)
        super().__init__(config, places)
        check_vocab(self.data.vocab, self.config.vocab)
        self._checkpoints = Checkpoints(Path(config.out, "checkpoints"), keep=config.keep, group=everybody)

    def resume(self) -> ResumePoint | None:
        return self._checkpoints.resume(self._model, self._optimizer)

    def save(self, step: int, data: str) -> None:
        self._checkpoints.save(step, self._model, self._optimizer, data=data, more=adapters_of(self._config))

    def finish(self) -> None:
        self._checkpoints.close()
        out, lora, group = Path(self._config.out), self._config.lora, self._places.everybody
        if lora is not None:
            save_adapters(self._model, lora, out / "adapters", self._config.init_from, group)
            merge_adapters(self._model)
        save_weights(self._model, out / "weights", group=group)
