"""A transformers Trainer in which the ranks of a ring share every row of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import Trainer

from ring_attn_core.releases import warn_if_untried

from .global_batch import ModelRing
from .models import hugging_face_model, uses_all_weights
from .parallel import calls_of, check_entry, on_shards
from .settings import ring_of_model
from .trainer_arguments import check_arguments, check_group, check_kind, check_trainer, of_trl

Base: Any = Trainer if TYPE_CHECKING else object
"""The base of the mixin for type checkers: the Trainer that it is combined with."""


class RingTraining(Base):
    """A mixin for a Trainer: the ranks of a ring share every row of a batch, each with a shard of its tokens.

    Put it before the Trainer, as in ``class Mine(RingTraining, SFTTrainer): pass``.

    It takes the Trainer's arguments, and ``group``, ``layout``, ``loss_chunk`` as :func:`sequence_parallel`. Without ``group``
    the ring is the cp axis of ``TrainingArguments(parallelism_config=...)`` if that has one, else the ring of ``enable``, else
    all ranks. Rings of consecutive ranks stand side by side: each has its own rows, as data parallel ranks do.

    Datasets, samplers, workers, accumulation, clipping, logs, checkpoints and resuming are the Trainer's own, and batches are
    counted per ring. Losses, gradients and the gradient norm are those of a Trainer with one data parallel process in place of
    each ring: the loss is divided by the number of labels of all rings and all accumulated batches. A penalty that a
    ``compute_loss`` adds to the loss of the model counts once: DDP and FSDP average gradients over the ranks, and only the
    gradient of the model's own loss is multiplied by the ranks of the ring to make up for that. ``evaluate`` and
    ``predict`` return global logits and labels in natural order, with metrics of the whole batch, on every rank. trl's SFTTrainer
    trains with its plain loss, without its metrics of entropy and accuracy, which need logits.

    Raise ValueError if an argument is not supported, and name it.
    """

    ring: ModelRing

    def __init__(
        self,
        *args: Any,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        layout: str | None = None,
        loss_chunk: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._asked = group, layout, loss_chunk
        self._scope: ExitStack | None = None
        self._in_loss = False
        super().__init__(*args, **kwargs)
        check_trainer(self)
        check_entry(self.model, self.ring, self.args.device.type)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, one that gives every rank of a ring the same rows."""
        warn_if_untried("accelerate", self.args.process_index == 0)
        check_kind(self)
        check_arguments(self.args)
        if self.args.accelerator_config.dispatch_batches is None:
            self.args.accelerator_config.dispatch_batches = False  # else one rank would read all rows and send each rank its own
        if self.args.ddp_find_unused_parameters is None and uses_all_weights(hugging_face_model(self.model)):
            self.args.ddp_find_unused_parameters = False  # with True, DDP warns on every rank that it found none
        super().create_accelerator_and_postprocess()
        accelerator, (group, layout, _) = self.accelerator, self._asked
        config = accelerator.parallelism_config
        axis = accelerator.torch_device_mesh["cp"] if config is not None and config.cp_enabled else None
        self.ring = ring_of_model(hugging_face_model(self.model), axis if group is None else group, layout)
        check_group(self.ring, config)
        if axis is not None:
            accelerator._prepare_cp = lambda *prepared: prepared  # else it would add its own context parallelism
        elif self.ring.ranks > 1:
            shape = self.args.world_size // self.ring.ranks, self.ring.ranks
            mesh = init_device_mesh(self.args.device.type, shape, mesh_dim_names=("dp_replicate", "cp"))
            accelerator._prepare_device_mesh = lambda: mesh  # by which it distributes rows

    @contextmanager
    def _on_the_ring(self) -> Iterator[None]:
        """Make the model compute shards inside this ``with``; a nested entry, such as an evaluation in training, does nothing."""
        if self._scope is not None:
            yield
            return
        _, _, loss_chunk = self._asked
        with ExitStack() as self._scope:
            try:
                self._scope.enter_context(on_shards(self.model, self.ring, loss_chunk=loss_chunk, averaged=True))
                yield
            finally:
                self._scope = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, as the Trainer does."""
        with self._on_the_ring():
            return super().train(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict, as the Trainer does, each row once."""
        with self._on_the_ring():
            self.gather_function = self._gather_rows
            return super().evaluation_loop(*args, **kwargs)

    @contextmanager
    def compute_loss_context_manager(self) -> Iterator[None]:  # type: ignore[override]
        """Enter the Trainer's own contexts, and add a note to an error of a user's own loss."""
        owner = next(kind for kind in type(self).__mro__ if "compute_loss" in vars(kind) and kind is not RingTraining)
        self._in_loss = True
        try:
            with super().compute_loss_context_manager():
                yield
        except (RuntimeError, ValueError, IndexError, AttributeError, TypeError) as error:
            if owner is not Trainer and not of_trl(owner) and self.ring.ranks > 1:
                error.add_note(
                    f"{owner.__name__}.compute_loss ran on a ring of {self.ring.ranks} ranks: labels are of whole rows, and the "
                    "model's logits are this rank's shard in layout order, or None with loss_chunk. Let the model compute the "
                    "loss, from labels"
                )
            raise
        finally:
            self._in_loss = False

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the next class. trl's SFTTrainer is skipped, because its loss comes from a head of its own."""
        return self._next("compute_loss")(*args, **kwargs)

    def _next(self, name: str) -> Callable[..., Any]:
        """Return a method of the next class that defines it; transformers' own in place of trl's."""
        order = type(self).__mro__
        owner = next(kind for kind in order[order.index(RingTraining) + 1 :] if name in vars(kind))
        return getattr(Trainer if of_trl(owner) else owner, name).__get__(self)

    def get_tp_size(self) -> int:
        """Return the tensor parallel size, times the ring's ranks while the loss is scaled by the processes with rows of their
        own.
        """
        size = super().get_tp_size()
        return size * self.ring.ranks if self._in_loss else size

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Return the loss and, unless ``prediction_loss_only``, global logits and labels."""
        with nullcontext() if prediction_loss_only else calls_of(self.model).gathering():
            return self._next("prediction_step")(model, inputs, prediction_loss_only, ignore_keys)

    def _gather_rows(self, data: Any) -> Any:
        """Return the rows of all rings, each once, without those that only fill the last batch."""
        from accelerate.utils import recursively_apply  # type: ignore[import-not-found]

        rings, state = self.args.world_size // self.ring.ranks, self.accelerator.gradient_state
        left = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        once = lambda x: (x if rings == 1 else x.unflatten(0, (rings, self.ring.ranks, -1))[:, 0].flatten(0, 1))[:left]
        return recursively_apply(once, data if rings == 1 else self.accelerator.gather(data))

    def get_cp_size(self) -> int:
        """Return the number of ranks that share a row."""
        return self.ring.ranks

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Return this rank's part of the operations on global rows."""
        return super().floating_point_ops(inputs) / self.ring.ranks

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the tokens of every ring once."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.ring.ranks

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the rows unsplit, which accelerate's own context parallelism would split."""
        return nullcontext, inputs


class RingTrainer(RingTraining, Trainer):
    """A transformers Trainer in which the ranks of a ring share every row: see :class:`RingTraining`."""
