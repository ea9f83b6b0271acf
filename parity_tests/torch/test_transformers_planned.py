"""RingTrainer and trl's SFTTrainer on planned documents: the steps of one process that takes each document by itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers", minversion="5.20", reason="RingTrainer needs it")
pytest.importorskip("accelerate")

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

import ring_attn_torch.transformers as hf

from ..support.models import apart
from .hugging_face import VOCAB, make
from .hugging_face_training import ON_CPUS, Gradients, Kill, Killed, gradients_of, launched, logged, tuned_by_trl, weights_of
from .test_transformers_training import near

pytestmark = pytest.mark.slow
NEAR = 1e-5
LENGTHS = [int(n) for n in np.random.default_rng(2).lognormal(2.2, 0.9, 60).clip(4, 48)]
TOKENS, PARTS = 48, 3
"""Tokens of a microbatch on all ranks; microbatches of a step."""


class Documents(Dataset):
    """The documents ``taken``; of document i every fourth token has no label."""

    def __init__(self, taken: Sequence[int] = range(len(LENGTHS))) -> None:
        self.taken = taken

    def __len__(self) -> int:
        return len(self.taken)

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        document = self.taken[row]
        ids = torch.randint(3, VOCAB, (LENGTHS[document],), generator=torch.Generator().manual_seed(document)).tolist()
        labels = [-100 if (i + document) % 4 == 0 else x for i, x in enumerate(ids)]
        return {"input_ids": ids, "labels": [-100, *labels[1:]]}


class Drawn(NamedTuple):
    logs: list[dict[str, float]]
    gradients: tuple[dict[str, np.ndarray], ...]
    weights: dict[str, np.ndarray]
    rows: list[list[int]]
    """The documents of each microbatch."""


class Recorded(DataCollatorWithFlattening):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []
        self.known = {(*Documents()[i]["input_ids"],): i for i in range(len(LENGTHS))}

    def __call__(self, features: Any, *args: Any, **kwargs: Any) -> Any:
        self.rows.append([self.known[(*each["input_ids"],)] for each in features])
        return super().__call__(features, *args, **kwargs)


def arguments(folder: str, **settings: Any) -> TrainingArguments:
    defaults = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": PARTS,
        "learning_rate": 3e-3,
        "adam_epsilon": 1e-4,
    }
    return TrainingArguments(folder, **ON_CPUS | defaults | {"logging_steps": 1, "seed": 5} | settings)


def planned(
    group: Any, folder: str, steps: int, killed: int = 0, resumed: bool = False, callbacks: Sequence[Any] = (), **settings: Any
) -> Drawn:
    """Train on planned documents over the ring of ``group``."""
    torch.set_grad_enabled(True)
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    with launched(rank, ranks):
        torch.manual_seed(0)
        collator = Recorded()
        trainer = hf.RingTrainer(
            model=make("llama", "float32", "sdpa"),
            args=arguments(folder, **{"max_steps": steps} | settings),
            train_dataset=Documents(),
            data_collator=collator,
            callbacks=[Gradients(), *callbacks, *([Kill(killed)] if killed else [])],
            layout="balanced",
            tokens_per_rank=TOKENS // ranks,
        )
        with suppress(Killed):
            trainer.train(resume_from_checkpoint=resumed or None)
        return Drawn(logged(trainer), gradients_of(trainer), weights_of(trainer), collator.rows)


def of_one_process(documents: list[int], folder: str) -> dict[str, np.ndarray]:
    """Return the gradients of the first step of transformers' own Trainer, one document after the other."""
    with launched(0, 1):
        torch.manual_seed(0)
        trainer = Trainer(
            model=make("llama", "float32", "sdpa"),
            args=arguments(folder, max_steps=1, gradient_accumulation_steps=len(documents), train_sampling_strategy="sequential"),
            train_dataset=Documents(documents),
            data_collator=DataCollatorWithFlattening(),
            callbacks=[Gradients()],
        )
        trainer.train()
    return gradients_of(trainer)[0]


def test_a_step_is_that_of_one_process_that_takes_each_document_by_itself(four: Any, tmp_path: Any):
    outcomes = [planned(None, str(tmp_path), 1), *four(4, planned, str(tmp_path), 1)]
    rows = outcomes[0].rows[:PARTS]
    want = of_one_process([document for row in rows for document in row], str(tmp_path))
    for outcome in outcomes:
        assert outcome.rows[:PARTS] == rows
        assert apart(outcome.gradients[0], want) < NEAR


def test_a_run_goes_on_from_a_checkpoint_with_the_documents_that_it_would_have_had(tmp_path: Any):
    steps = 2 * epoch_steps() - 1
    whole = planned(None, str(tmp_path / "whole"), steps)
    planned(None, str(tmp_path / "cut"), steps, killed=steps - 2, save_strategy="steps", save_steps=1)
    after = planned(None, str(tmp_path / "cut"), steps, resumed=True)
    assert after.rows[:PARTS] == whole.rows[(steps - 2) * PARTS : (steps - 1) * PARTS]
    assert apart(after.weights, whole.weights) == 0
    assert len({*map(tuple, whole.rows)}) > 0.8 * len(whole.rows), "the second epoch has the batches of the first"


def epoch_steps() -> int:
    return sum(LENGTHS) // (PARTS * TOKENS)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # trl's own, which sets it by default
def test_trls_sft_trainer_plans_documents_as_on_one_process(four: Any, tmp_path: Any):
    pytest.importorskip("trl")
    want = tuned_by_trl(None, str(tmp_path), 4, planned=96)
    for got in four(4, tuned_by_trl, str(tmp_path), 4, False, 96):
        near(got, want)


class Longer(DataCollatorWithFlattening):
    def __call__(self, features: Any, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(features * 9, *args, **kwargs)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(Documents())


@pytest.mark.parametrize(
    ("words", "settings", "trainer"),
    [
        ("layout is 'zigzag': pass layout=\"balanced\"", {}, {"layout": "zigzag"}),
        ("pass per_device_train_batch_size=1", {"per_device_train_batch_size": 2}, {}),
        ("train_sampling_strategy is 'group_by_length'", {"train_sampling_strategy": "group_by_length"}, {}),
        ("tokens_per_rank must be an int of at least 1, got 0", {}, {"tokens_per_rank": 0}),
        ("a document of 48 tokens, and tokens_per_rank=40 on 1 ranks holds 40: pass 48 or more", {}, {"tokens_per_rank": 40}),
        ("fewer than one step of 3 microbatches of 9000", {}, {"tokens_per_rank": 9000}),
        ("pass a train_dataset with __len__, not a stream", {}, {"train_dataset": Stream()}),
        ("by input_ids, one list of token ids a row", {}, {"train_dataset": [{"labels": [1]}]}),
        ("by input_ids, one list of token ids a row", {}, {"train_dataset": [{"input_ids": [[4, 5]]}]}),
        ("does not: pass data_collator=DataCollatorWithFlattening", {}, {"data_collator": None}),
        ("a planned row has", {}, {"data_collator": Longer()}),
        ("pass data_collator=DataCollatorWithFlattening", {}, {"data_collator": lambda rows: {"input_ids": rows}}),
    ],
)
def test_settings_and_data_that_cannot_be_planned_are_refused(words: str, settings: Any, trainer: Any, tmp_path: Any):
    given = {"train_dataset": Documents(), "data_collator": DataCollatorWithFlattening(), "layout": "balanced"}
    with launched(0, 1):
        args = arguments(str(tmp_path), max_steps=1, **settings)
        made = hf.RingTrainer(model=make("llama", "float32", "sdpa"), args=args, **given | {"tokens_per_rank": TOKENS} | trainer)
        with pytest.raises(ValueError, match=re.escape(words)):
            made.train()


def test_plans_that_differ_are_refused_on_every_rank(four: Any, tmp_path: Any):
    four.refuse("digest of the documents' lengths", 4, with_other_documents, str(tmp_path))


def with_other_documents(group: Any, folder: str) -> None:
    if group.rank() == 3:
        LENGTHS[0] += 1
    planned(group, folder, 1)


def test_each_epoch_takes_every_document_at_most_once_and_others_after_a_stop(tmp_path: Any):
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = state.global_step % 2 == 0

    whole = [document for row in planned(None, str(tmp_path), 100, max_steps=-1, num_train_epochs=1).rows for document in row]
    assert len(whole) == len({*whole}) > 0.8 * len(LENGTHS)
    rows = planned(None, str(tmp_path), 4, callbacks=[Stop()]).rows
    assert rows[: 2 * PARTS] != rows[-2 * PARTS :]


def test_planned_documents_need_a_ring_of_all_ranks(four: Any, tmp_path: Any):
    four.refuse("plans for one ring of all ranks, and the ring has 2 of 4: leave group out", 4, on_rings_of_two, str(tmp_path))


def on_rings_of_two(group: Any, folder: str) -> None:
    rings = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = make("llama", "float32", "sdpa")
    with launched(group.rank(), 4):
        args = arguments(folder, max_steps=1)
        planned = {"layout": "balanced", "tokens_per_rank": TOKENS, "train_dataset": Documents()}
        hf.RingTrainer(model=model, args=args, group=rings[group.rank() // 2], **planned).train()
