"""A training run in PyTorch, one process per rank. Imported only if PyTorch is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # torch.optim imports it at a rank's first step; here, once for all ranks
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import get_node_local_rank

import ring_attn_torch
from ring_attn_core.model.progress import ResumePoint
from ring_attn_torch import (
    Checkpoints,
    RingTransformer,
    SequenceShardedDataset,
    Shard,
    check_ranks,
    count_labels,
    loss,
    shard_batch,
    sum_gradients,
)
from ring_attn_torch.training import lora  # noqa: F401  # data.py takes it from the package

from ..processes import Report
from .arithmetic import rates
from .config import Config
from .data import build_model, check_vocab, dataset_arguments, save_model
from .folder import CHECKPOINTS, extract_lora, hold
from .loop import RunDevices, Tell, TrainStep, measure_process, train
from .torch_ranks import CPU, device_of, join_launched, member, report_errors


def work(report: Report, rank: int, config: Config, store: str) -> None:
    """Train as one rank that ``ring-attn train`` started; rank 0 reports the log. ``store``: file by which the ranks meet."""
    ranks = config.ring.ranks * config.ring.replicas
    device = device_of(rank, ranks)
    if device.type == "cpu":
        torch.set_num_threads(1)
    with member(device, rank, ranks, store), report_errors(report):
        run(config, report, device)


def work_under_torchrun(config: Config, tell: Tell) -> None:
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
        with hold(config, dist.get_rank() == 0, share_text):
            run(config, tell, device)
    finally:
        dist.destroy_process_group()


def share_text(words: str, group: dist.ProcessGroup | None = None) -> str:
    sent = [words]
    dist.broadcast_object_list(sent, 0, group)
    return sent[0]


def run(config: Config, tell: Tell, device: torch.device) -> None:
    """Train as one of the ranks of the default group. ``tell`` gets each line of the log on rank 0."""
    mesh = init_device_mesh(device.type, (config.ring.replicas, config.ring.ranks), mesh_dim_names=("data", "seq"))
    place = RankPlace(mesh.get_group("seq"), dist.group.WORLD, mesh.get_local_rank("data"), device)
    train(config, TorchTrainer(config, place), tell if dist.get_rank() == 0 else lambda kind, values: None)


class RankPlace(NamedTuple):
    """A rank's process groups (its ring, and all ranks), the index of its replica, and its device."""

    ring: Any
    everybody: Any
    replica: int
    device: torch.device


def shard_weights(model: RingTransformer, place: RankPlace) -> RingTransformer:
    """Shard the weights over all ranks by FSDP2, block by block, which moves each block to the device.
    It averages gradients over the ranks, and ``sum_gradients`` multiplies the mean by the number of ranks."""
    from torch.distributed.fsdp import FSDPModule, fully_shard  # takes a second to import

    mesh = DeviceMesh.from_group(place.everybody, place.device.type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(place.device.type == "cpu")  # gloo has no mean
    return model


class TorchTrainer:
    """The ``Trainer`` of one rank of a run in PyTorch."""

    def __init__(self, config: Config, place: RankPlace) -> None:
        self._config, self._place = config, place
        self._rank = dist.get_rank(place.ring)
        self.first = dist.get_rank(place.everybody) == 0
        self._sharded = config.ring.weights == "sharded"
        with CPU if self._sharded else place.device:
            model = build_model(config, ring_attn_torch, RingTransformer.from_config, group=place.ring)
        self._model: RingTransformer = shard_weights(model, place) if self._sharded else model
        self.model_config = self._model.config
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self.parameters, self.trained = (sum(p.numel() for p in each) for each in (self._model.parameters(), trained))
        settings = config.optimizer
        matrices, vectors = ([p for p in trained if (p.ndim > 1) == many] for many in (True, False))
        groups = [{"params": matrices, "weight_decay": settings.decay}, {"params": vectors, "weight_decay": 0.0}]
        betas = settings.beta1, settings.beta2
        self._optimizer = torch.optim.AdamW(groups, settings.learning_rate, betas, settings.eps)
        self._rates = rates(settings, config.steps)

    def open(self) -> None:
        config, place = self._config, self._place
        rows: dict[str, Any] = {"batch_size": config.data.batch_size, "replicas": config.ring.replicas, "replica": place.replica}
        self.data, self.held_out = (
            SequenceShardedDataset(**dataset_arguments(config, held_out), rank=self._rank, **rows) for held_out in (False, True)
        )
        check_ranks({"data": self.data.state(), "held out": self.held_out.state()}, place.everybody)
        check_vocab(self.data.vocab, self.model_config.vocab)
        self._checkpoints = Checkpoints(Path(config.out, CHECKPOINTS), keep=config.keep, group=place.everybody)

    def resume(self) -> ResumePoint | None:
        return self._checkpoints.resume(self._model, self._optimizer)

    def save(self, step: int, data: str) -> None:
        self._checkpoints.save(step, self._model, self._optimizer, data=data, more=extract_lora(self._config))

    def finish(self) -> None:
        self._checkpoints.close()
        save_model(self._config, ring_attn_torch, self._model, group=self._place.everybody)

    def shard(self, ids: list[list[int]], labels: list[list[int]]) -> Shard:
        size, ring = self._config.data.batch_size, self._config.ring
        local = slice(self._place.replica * size, (self._place.replica + 1) * size)
        tokens, targets = torch.tensor(ids[local]), torch.tensor(labels[local])
        return shard_batch(tokens, ring.layout, ring.ranks, self._rank, labels=targets, documents=torch.zeros_like(tokens))

    def step(self, number: int, microbatches: list[Shard]) -> TrainStep:
        microbatches = list(map(self._move, microbatches))
        total = sum(count_labels(shard.labels, group=self._place.everybody) for shard in microbatches)
        assert isinstance(total, Tensor)
        self._optimizer.zero_grad()
        value = torch.zeros((), device=self._place.device)
        for i, shard in enumerate(microbatches):
            part = self._loss(self._hidden(shard, number, i), shard.labels) / total.clamp(min=1)
            part.backward()
            value = value + part.detach()
        sum_gradients(self._model, self._place.everybody)
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
        shard = self._move(microbatch)
        hidden = self._hidden(shard)
        assert shard.extents is not None
        before = shard.positions - shard.extents[..., 0]
        for begin, end in zip((0, *ends), ends, strict=False):
            labels = torch.where((begin <= before) & (before < end), shard.labels, -100)
            count = count_labels(labels, group=self._place.everybody)
            yield self._loss(hidden, labels).item(), int(count)

    @torch.no_grad()
    def wrong(self, microbatch: Shard) -> list[int]:
        shard, place = self._move(microbatch), self._place
        missed = torch.zeros(self._config.rows, dtype=torch.int64, device=place.device)
        rows, tokens = (shard.labels != -100).nonzero(as_tuple=True)
        hidden = self._hidden(shard)[rows, tokens]
        best = (hidden @ self._model.head_weight.to(hidden.dtype).T).argmax(-1)
        missed.index_add_(0, rows + place.replica * self._config.data.batch_size, (best != shard.labels[rows, tokens]).long())
        dist.all_reduce(missed, group=place.everybody)
        return missed.tolist()

    def machine(self) -> RunDevices:
        ranks, device = dist.get_world_size(self._place.everybody), self._place.device
        if device.type == "cuda":
            return RunDevices(torch.cuda.get_device_name(device), ranks, torch.cuda.max_memory_allocated(device))
        return RunDevices("cpu", ranks, measure_process())

    def _hidden(self, shard: Shard, step: int | None = None, microbatch: int = 0) -> Tensor:
        """Return a shard's last hidden states [rows, local tokens, dim].
        Apply the model's dropout only if ``step`` is passed. No two rows of a step share a mask: the seed is the run's plus
        ``step``, the offset is the rank's first row among all of the step."""
        row = microbatch * self._config.rows + self._place.replica * self._config.data.batch_size
        seed = None if step is None or not self.model_config.dropout_rate else self._config.seed + step
        inputs = shard.ids, shard.positions, shard.length
        masks: dict[str, Any] = {"extents": shard.extents, "layout": shard.layout}
        return self._model(*inputs, **masks, dropout_seed=seed, dropout_offset=(row, 0), return_hidden=True)

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        head, ring = self._model.head_weight, self._config.ring
        options: dict[str, Any] = {"chunk": ring.chunk, "order": ring.order, "reduction": "sum"}
        return loss(hidden, labels, head=head, **options, group=self._place.everybody)

    def _move(self, shard: Shard) -> Shard:
        device = self._place.device
        return shard._replace(**{name: x.to(device) for name, x in shard._asdict().items() if isinstance(x, Tensor)})
