"""Runs of transformers' Trainer: packed rows with uneven labels, on one process and on rings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import ring_attn_torch.transformers as hf

from .hugging_face import VOCAB, in_float64, make

TOKENS, ROWS = 37, 30
ON_CPUS: Any = {
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "log_level": "error",
}
"""Arguments of a Trainer of trl: on CPUs, in float32, quiet, and without checkpoints."""


class Rows(Dataset):
    """Rows of two packed documents each; of row i every token has a label with a chance of 1 - (i mod 5) / 6."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(row)
        first = int(torch.randint(5, TOKENS - 5, (1,), generator=generator))
        position_ids = torch.cat([torch.arange(first), torch.arange(TOKENS - first)])
        start = torch.randint(3, VOCAB, (2,), generator=generator)
        input_ids = 3 + (start[(torch.arange(TOKENS) >= first).long()] + position_ids) % (VOCAB - 3)
        left_out = torch.rand(TOKENS, generator=generator) < (row % 5) / 6
        return {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "labels": input_ids.masked_fill(left_out | (position_ids == 0), -100),
        }


class Stream(IterableDataset):
    """A stream of the same rows, one after another, without a known length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (Rows()[row] for row in range(ROWS))


class Run(NamedTuple):
    """A run of a Trainer: ``rows`` in a batch; ``ring``: of how many ranks, 0: all; ``settings``: of TrainingArguments, or cp.

    ``before``: what is called before ``train``: evaluate or predict, or "another" for evaluate of transformers' own Trainer.
    ``own_mean``: the model is one that transformers does not tell how many labels all batches of a step have.
    """

    steps: int
    folder: str
    rows: int = 2
    ring: int = 0
    settings: tuple[tuple[str, Any], ...] = ()
    trainer: tuple[tuple[str, Any], ...] = ()
    model: str = "llama"
    lora: bool = False
    evaluated: bool = False
    killed_after: int = 0
    resumed: bool = False
    own_mean: bool = False
    streamed: bool = False
    before: str = ""
    dtype: str = "float32"


@contextmanager
def on_cpus() -> Iterator[None]:
    """Inside this ``with`` accelerate takes a ParallelismConfig on CPUs too, where it knows DDP alone."""
    from accelerate import ParallelismConfig  # type: ignore[import-not-found]

    with patch.object(ParallelismConfig, "_validate_accelerator", lambda *_: None):
        yield


class Result(NamedTuple):
    """The results that a run leaves on a rank."""

    weights: dict[str, np.ndarray]
    logs: list[dict[str, float]]
    metrics: dict[str, float]
    logits: np.ndarray | None
    labels: np.ndarray | None
    counted: tuple[float, float] = 0, 0
    """The tokens that were seen, where that was asked for, and the floating point operations."""
    gradients: tuple[dict[str, np.ndarray], ...] = ()
    """The clipped gradients of every step of this run."""


class Killed(Exception):
    """Ends a run in the middle of a step."""


class Kill(TrainerCallback):
    """Ends a run after ``steps`` steps, in the next one."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.steps:
            raise Killed


class Gradients(TrainerCallback):
    """Copies the gradients with which each step is made."""

    def __init__(self) -> None:
        self.copies: list[dict[str, np.ndarray]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.copies.append({name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None})


@contextmanager
def launched(rank: int, ranks: int) -> Iterator[None]:
    """Inside this ``with`` accelerate finds what torchrun says of this process, and knows nothing of other runs."""
    from accelerate.state import AcceleratorState, GradientState, PartialState  # type: ignore[import-not-found]

    def forget() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()

    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    said["OMP_NUM_THREADS"] = 1  # else accelerate gives every process as many threads as there are cores
    forget()
    try:
        with patch.dict(os.environ, {name: str(x) for name, x in said.items()} if ranks > 1 else {}):
            yield
    finally:
        forget()


def metrics(prediction: Any) -> dict[str, float]:
    """Return the share of the tokens with a label that are the likeliest."""
    guessed, wanted = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((guessed == wanted)[wanted != -100].mean())}


def model_of(run: Run) -> Any:
    model = make(run.model, run.dtype, "sdpa")
    if run.own_mean:
        model.accepts_loss_kwargs = False
    if not run.lora:
        return model
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def trained(run: Run, group: Any = None, kind: type[Trainer] | None = None) -> Result:
    """Train as ``run`` says: on a ring of ``group``'s ranks where there is one, else with transformers' own Trainer."""
    torch.set_grad_enabled(True)
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    settings = dict(run.settings)
    rings = [dist.new_group(range(i, i + run.ring)) for i in range(0, ranks, run.ring)] if run.ring else []
    with launched(rank, ranks), on_cpus():
        torch.manual_seed(0)
        if cp := settings.pop("cp", None):
            from accelerate import ParallelismConfig  # type: ignore[import-not-found]

            settings["parallelism_config"] = ParallelismConfig(cp_size=cp, dp_shard_size=ranks // cp)
        arguments = TrainingArguments(
            output_dir=run.folder,
            **{
                "max_steps": run.steps,
                "per_device_train_batch_size": run.rows,
                "per_device_eval_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "learning_rate": 3e-3,
                "adam_epsilon": 1e-4,  # a smaller one makes steps of gradients that are rounding and nothing else
                "logging_steps": 1,
                "use_cpu": True,
                "save_strategy": "no",
                "report_to": [],
                "disable_tqdm": True,
                "ddp_find_unused_parameters": False,
                "log_level": "error",
            }
            | settings,
        )
        others: dict[str, Any] = dict(run.trainer) | ({"group": rings[rank // run.ring]} if run.ring else {})
        trainer = (kind or (Trainer if group is None else hf.RingTrainer))(
            model=model_of(run),
            args=arguments,
            train_dataset=Stream() if run.streamed else Rows(),
            eval_dataset=Rows(),
            compute_metrics=metrics,
            callbacks=[Gradients(), *([Kill(run.killed_after)] if run.killed_after else [])],
            **others,
        )
        trainer.pop_callback(next(c for c in trainer.callback_handler.callbacks if type(c).__name__ == "PrinterCallback"))
        with in_float64() if run.dtype == "float64" else nullcontext():
            return _result(run, trainer)


def _result(run: Run, trainer: Trainer) -> Result:
    if run.before == "another":
        Trainer(model=trainer.model, args=trainer.args).evaluate(Rows())  # type: ignore[arg-type]
    elif run.before:
        getattr(trainer, run.before)(Rows())
    try:
        trainer.train(resume_from_checkpoint=run.resumed or None)
    except Killed:
        return Result({}, [], {}, None, None)
    measured, logits, labels = {}, None, None
    if run.evaluated:
        told = trainer.evaluate()
        measured = {name: told[name] for name in ("eval_loss", "eval_accuracy")}
        logits, labels, told = trainer.predict(Rows())  # type: ignore[misc]
        assert told is not None
        assert {f"test_{name}" for name in ("loss", "accuracy")} <= set(told)
    counted = float(trainer.state.num_input_tokens_seen), trainer.state.total_flos
    return Result(weights_of(trainer), logged(trainer), measured, logits, labels, counted, gradients_of(trainer))  # type: ignore[arg-type]


def weights_of(trainer: Any) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in trainer.model.named_parameters() if p.requires_grad}


def gradients_of(trainer: Any) -> tuple[dict[str, np.ndarray], ...]:
    (recorder,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Gradients))
    return tuple(recorder.copies)


def logged(trainer: Any) -> list[dict[str, float]]:
    """The loss and the norm of the gradient, step by step."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{name: float(entry[name]) for name in ("loss", "grad_norm")} for entry in entries]


def tuned_by_trl(group: Any, folder: str, steps: int = 10, evaluated: bool = False, planned: int | None = None) -> Result:
    """Train with trl's SFTTrainer on packed documents, on a ring if there is a ``group``. ``evaluated``: evaluate before.
    ``planned``: in planned microbatches of so many tokens, on one process too."""
    from datasets import Dataset as Table  # type: ignore[import-not-found]
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    class RingSFTTrainer(hf.RingTraining, SFTTrainer):
        pass

    torch.set_grad_enabled(True)
    documents = [list(range(3 + i % 7, 3 + i % 7 + 5 + i * 5 % 14)) for i in range(40)]
    words = {f"<{i}>": i for i in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<0>")), pad_token="<0>", eos_token="<2>"
    )
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    rows: Any = {"packing": True, "max_length": TOKENS, "per_device_train_batch_size": 2}
    ring: Any = {}
    if planned:
        rows = {"padding_free": True, "max_length": None, "per_device_train_batch_size": 1}
        ring = {"layout": "balanced", "tokens_per_rank": planned // ranks}
    with launched(rank, ranks):
        steady: Any = {
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 3e-3,
            "adam_epsilon": 1e-4,
        }
        arguments = SFTConfig(output_dir=folder, max_steps=steps, logging_steps=1, **steady, **rows, **ON_CPUS)
        kind = SFTTrainer if group is None and not planned else RingSFTTrainer
        table = Table.from_dict({"input_ids": documents})
        data: Any = {"train_dataset": table, "eval_dataset": table, "processing_class": tokenizer, "callbacks": [Gradients()]}
        trainer = kind(model=make("llama", "float32", "sdpa"), args=arguments, **data, **ring)
        if evaluated:
            trainer.evaluate()
        trainer.train()
        measured = {"eval_loss": trainer.evaluate()["eval_loss"]}
        return Result(weights_of(trainer), logged(trainer), measured, None, None, gradients=gradients_of(trainer))


def all_trained(group: Any, runs: list[Run]) -> list[Result]:
    """Train in a process of the pool, once for each run."""
    return [trained(run, group) for run in runs]
