"""RingTrainer, a transformers Trainer that shards every row of a batch over the ranks of a ring. Trainers of trl can do so too.

accelerate sees a device mesh in which the ranks of a ring are one axis, so it deals rows to rings, not to ranks. Its own context
parallelism would shard the rows again, so it is switched off, and ``AccelerateHooks`` in attention.py removes its hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, float32, nn, promote_types
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import Trainer, TrainerCallback

from ring_attn_core.problem.strategies import Strategy
from ring_attn_core.releases import warn_if_untried
from ring_attn_core.validation import check_mixin_first

from ..ring.groups import ring_of
from .arguments import check_training_arguments, check_weights
from .masks import CallRing
from .models import DENSE, check_entry, hugging_face_model
from .parallel import HOOKS, on_shards, ring_of_model
from .planned_rows import plan_loader
from .trainer_checks import check_group, check_kind, check_trainer, of_trl

UNSUMMED = (
    "the first step was made with gradients that are not summed over all ranks, or other code changed a weight on one rank: let "
    "the Trainer wrap the model, and change weights on every rank alike"
)

Base: Any = Trainer if TYPE_CHECKING else object
"""The base class of RingTraining: for type checkers the Trainer that it is combined with, else object."""


class RingTraining(Base):
    """A mixin for a Trainer that shards the tokens of every row over the ranks of a ring.

    Put it before the Trainer, as in ``class Mine(RingTraining, SFTTrainer): pass``.

    The arguments are the Trainer's, and ``group``, ``layout``, ``loss_chunk``, ``strategy`` and ``order`` of
    :func:`sequence_parallel`. Without ``group`` the ring is the cp axis of ``TrainingArguments(parallelism_config=...)``, else
    the ring of ``enable``, else all ranks. Smaller rings are equally large, of consecutive ranks, and have their own rows.

    ``tokens_per_rank``: plan the training documents, one a row of ``train_dataset``, as :func:`plan_batches` does, for the
    balanced layout. Each step has ``gradient_accumulation_steps`` microbatches of at most so many tokens a rank.

    Datasets, samplers, workers, accumulation, clipping, logs and checkpoints are the Trainer's own. All ranks of a ring get the
    same rows, as many as the batch size per device. Losses, gradients and the gradient norm are those of a Trainer with one data
    parallel process in place of each ring. DDP and FSDP average gradients over the ranks, so the gradient of the model's own loss
    is multiplied by the ring's number of ranks; a penalty that ``compute_loss`` adds is not, so it counts once. On every rank,
    ``predict`` returns and ``compute_metrics`` gets global logits and labels in natural order. trl's SFTTrainer trains with the
    model's plain loss, and omits its metrics of entropy and accuracy, because these need logits.

    Raise ValueError, naming the argument, if one is not supported. Raise it also if ranks hold different weights of the reference
    model or of the evaluated model, or if the bases of a new class name a Trainer before RingTraining.
    """

    ring: CallRing

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_mixin_first(cls, RingTraining, lambda kind: kind is Trainer or of_trl(kind))

    def __init__(
        self,
        *args: Any,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        layout: str | None = None,
        loss_chunk: int | None = None,
        strategy: Strategy | None = None,
        order: str | None = None,
        tokens_per_rank: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._ring_settings, self._loss_chunk = (group, layout, strategy, order), loss_chunk
        self._tokens_per_rank = tokens_per_rank
        self._inside = self._in_loss = self._renamed = False
        super().__init__(*args, **kwargs)
        check_trainer(self)
        self._tp_size = self.ring.ranks  # trl counts the tokens of a row on every rank, and divides the sum by this
        for model in self._models():
            check_entry(model, self.ring, self.args.device.type)
        for reference in self._models()[1:]:  # DDP copies rank 0's weights of the model, but not of a reference
            self._compare_ranks(reference, "ref_model.")
        self.add_callback(CompareFirstStep(self._compare_ranks))

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, choose the ring, and create an accelerator that gives all ranks of the ring the same rows."""
        warn_if_untried("accelerate", self.args.process_index == 0)
        check_kind(self)
        check_training_arguments(self.args)
        if self.args.accelerator_config.dispatch_batches is None:
            self.args.accelerator_config.dispatch_batches = False  # else one rank would read all rows and send other rows to each
        if self.args.ddp_find_unused_parameters is None and hugging_face_model(self.model).config.model_type in DENSE:
            self.args.ddp_find_unused_parameters = False  # with True, DDP warns that all parameters are used
        super().create_accelerator_and_postprocess()
        accelerator, (group, layout, strategy, order) = self.accelerator, self._ring_settings
        config = accelerator.parallelism_config
        axis = accelerator.torch_device_mesh["cp"] if config is not None and config.cp_enabled else None
        self.ring = ring_of_model(self.model, axis if group is None else group, layout, strategy, order)
        check_group(self.ring, config)
        if axis is not None:
            accelerator._prepare_cp = lambda *prepared: prepared  # else it would add its own context parallelism
        elif self.ring.ranks > 1:
            shape = self.args.world_size // self.ring.ranks, self.ring.ranks
            mesh = init_device_mesh(self.args.device.type, shape, mesh_dim_names=("dp_replicate", "cp"))
            accelerator._prepare_device_mesh = lambda: mesh  # accelerate distributes rows by this mesh

    def _models(self) -> list[nn.Module]:
        return [model for model in (self.model, getattr(self, "ref_model", None)) if model is not None]

    def _compare_ranks(self, model: nn.Module, prefix: str = "", **words: str) -> None:
        check_weights(model, self.ring._replace(group=ring_of(None)), prefix, "all ranks", **words)

    @contextmanager
    def _on_the_ring(self) -> Iterator[None]:
        """Enter ``sequence_parallel`` for all models, unless it is entered already, as in an evaluation during training."""
        with ExitStack() as scope:
            for model in () if self._inside else self._models():
                scope.enter_context(on_shards(model, self.ring, loss_chunk=self._loss_chunk, averaged=True))
            scope.callback(setattr, self, "_inside", self._inside)
            self._inside = True
            yield

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's ``train`` inside ``sequence_parallel``."""
        if self.model_wrapped is self.model and not self.is_fsdp_enabled:
            # an evaluation of any Trainer marks the model as prepared for evaluation; accelerate would not wrap it in DDP again
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
            for module in self.model.modules():
                vars(module).pop("_is_accelerate_prepared", None)
        with self._on_the_ring():
            return super().train(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's loader of training data, or one of planned documents."""
        return super().get_train_dataloader() if self._tokens_per_rank is None else plan_loader(self, self._tokens_per_rank)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint. If names in it are not the model's, use ``from_pretrained``: the Trainer leaves such weights out."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._renamed:
            dtype = promote_types(self.model.dtype, float32)
            self.model.load_state_dict(type(self.model).from_pretrained(resume_from_checkpoint, dtype=dtype).state_dict())

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self._renamed:
            self._load_from_checkpoint(self.state.best_model_checkpoint)  # type: ignore[arg-type]

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        self._renamed = bool(load_result.unexpected_keys)
        if not self._renamed:
            super()._issue_warnings_after_load(load_result)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's evaluation or prediction inside ``sequence_parallel``, and count each row once."""
        if not self._inside and not self.state.global_step:  # no DDP has copied rank 0's weights
            self._compare_ranks(self.model)
        with self._on_the_ring():
            self.gather_function = self._gather_rows
            return super().evaluation_loop(*args, **kwargs)

    @contextmanager
    def compute_loss_context_manager(self) -> Iterator[None]:  # type: ignore[override]
        """Enter the Trainer's contexts. On several ranks, add a note on labels and logits to common errors of a user's loss."""
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
        """Return the loss that the next class in the MRO computes. Skip trl's SFTTrainer, whose loss needs trl's own head."""
        return self._next("compute_loss")(*args, **kwargs)

    def _next(self, name: str) -> Callable[..., Any]:
        """Return the first method ``name`` after RingTraining in the MRO. In place of SFTTrainer's method return Trainer's."""
        after = type(self).__mro__[type(self).__mro__.index(RingTraining) + 1 :]
        owner = next(kind for kind in after if name in vars(kind))
        return getattr(Trainer if of_trl(owner) and owner.__name__ == "SFTTrainer" else owner, name).__get__(self)

    def get_tp_size(self) -> int:
        """Return the tensor parallel size, in ``compute_loss`` times the ring's ranks: so the Trainer counts a ring once."""
        return super().get_tp_size() * (self.ring.ranks if self._in_loss else 1)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Return the loss and, unless ``prediction_loss_only``, global logits and labels. ``ignore_keys``: outputs left out."""
        if ignore_keys is None:
            ignore_keys = [*getattr(self.model.config, "keys_to_ignore_at_inference", ()), "aux_loss", "router_logits"]
        with nullcontext() if prediction_loss_only else HOOKS[hugging_face_model(self.model)].gathering():
            return self._next("prediction_step")(model, inputs, prediction_loss_only, ignore_keys)

    def _gather_rows(self, data: Any) -> Any:
        from accelerate.utils import recursively_apply  # type: ignore[import-not-found]

        rings, state = self.args.world_size // self.ring.ranks, self.accelerator.gradient_state
        left = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        once = lambda x: (x if rings == 1 else x.unflatten(0, (rings, self.ring.ranks, -1))[:, 0].flatten(0, 1))[:left]
        return recursively_apply(once, data if rings == 1 else self.accelerator.gather(data))

    def get_cp_size(self) -> int:
        """Return the number of ranks that shard one row."""
        return self.ring.ranks

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Return the floating point operations of a batch of global rows, divided by the ring's number of ranks."""
        return super().floating_point_ops(inputs) / self.ring.ranks

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Add a batch's tokens to ``state.num_input_tokens_seen``: the rows of a ring count once, not once per rank."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.ring.ranks

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return nullcontext, inputs


class CompareFirstStep(TrainerCallback):
    """Compares the ranks' weights once, after the first step of a training: the steps of unsummed gradients differ."""

    def __init__(self, compare: Callable[..., None]) -> None:
        self.compare, self.is_first = compare, False

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.is_first = True

    def on_step_end(self, *_: object, model: nn.Module, **__: object) -> None:
        if self.is_first:
            self.compare(model, remedy=UNSUMMED)
        self.is_first = False


class RingTrainer(RingTraining, Trainer):
    """A transformers Trainer that shards every row over the ranks of a ring: see :class:`RingTraining`."""
