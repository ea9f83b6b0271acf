"""Training documents of a Trainer, planned: whole ones in one packed row, and equal compute in the microbatches of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import Any

from torch.utils.data import DataLoader, Sampler

from ring_attn_core.data.global_batches import GlobalBatches
from ring_attn_core.data.settings import DatasetSettings
from ring_attn_core.validation import in_words, is_integer

from ..ring.agreement import AgreedCall, agree, same_error

ORDERS = {"random": True, "sequential": False}
"""The values of ``train_sampling_strategy`` that a plan can follow, and whether they shuffle."""
OF_THE_LOADER = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "multiprocessing_context", "in_order")
"""Arguments of a DataLoader that TrainingArguments has with "dataloader_" before them, as far as its release knows them."""
PACKING = (
    "tokens_per_rank packs the documents of a microbatch into one row, and the data collator does not: pass "
    "data_collator=DataCollatorWithFlattening(), or padding_free=True and max_length=None in trl's SFTConfig"
)


class PlannedRows(Sampler[list[int]]):
    """The documents of each microbatch, as rows of the dataset. ``steps``: how many steps the Trainer has made.

    Each epoch has as many steps as the first. Its documents depend on the epoch's number alone, so a run goes on from a
    checkpoint with those that it would have had.
    """

    batch_size, drop_last = None, False  # read by accelerate

    def __init__(self, plan: GlobalBatches, microbatches: int, steps: Callable[[], int]) -> None:
        self._plan, self._microbatches, self._steps, self._epoch = plan, microbatches, steps, 0

    def __len__(self) -> int:
        return self._plan.batches

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        # In a run that goes on, accelerate wraps this sampler and does not pass the epoch on.
        first = self._plan.first(max(self._epoch, self._steps() * self._microbatches // len(self)))
        for number in range(first, first + len(self)):
            yield [span.document for span in self._plan.batch(number)[0]]


def plan_loader(trainer: Any, tokens_per_rank: int) -> Any:
    """Return the loader of a Trainer's planned rows. Raise ValueError on all ranks if one cannot plan, or if plans differ."""
    args, ring, device = trainer.args, trainer.ring, trainer.args.device.type
    with same_error(ring.group):
        settings = settings_of(trainer, tokens_per_rank)
        lengths = lengths_of(trainer.train_dataset)
        check_lengths(lengths, settings, tokens_per_rank)
    shared = {name: getattr(settings, name) for name in ("length", "batch_tokens", "seed", "shuffle")}
    shared["digest of the documents' lengths"] = sha256(repr(lengths).encode()).hexdigest()[:16]
    agree(AgreedCall("RingTrainer(tokens_per_rank=...)", device, tuple(shared.items()), each_time=True), ring.group)
    plan = GlobalBatches(lengths, settings)
    if plan.left_out(0) and args.process_index == 0:
        steps = plan.batches // args.gradient_accumulation_steps
        words = "%d of %d documents do not fill one more step, and are left out of the first epoch of %d steps"
        logging.getLogger(__name__).warning(words, plan.left_out(0), len(lengths), steps)
    collator = trainer._get_collator_with_removed_columns(trainer.data_collator, "training")
    loader = DataLoader(
        trainer.train_dataset,
        batch_sampler=PlannedRows(plan, args.gradient_accumulation_steps, lambda: trainer.state.global_step),
        collate_fn=OneRow(collator, settings.length),
        **{name: x for name in OF_THE_LOADER if (x := getattr(args, f"dataloader_{name}", None)) is not None},
    )
    return trainer.accelerator.prepare(loader)


def settings_of(trainer: Any, tokens_per_rank: Any) -> DatasetSettings:
    """Return the settings of the plan."""
    args, ring = trainer.args, trainer.ring
    if not isinstance(tokens_per_rank, int) or not is_integer(tokens_per_rank) or tokens_per_rank < 1:
        raise ValueError(f"tokens_per_rank must be an int of at least 1, got {in_words(tokens_per_rank)}")
    order = getattr(args, "train_sampling_strategy", "random")
    if ring.layout != "balanced":
        raise ValueError(f'tokens_per_rank plans the balanced layout, and layout is {ring.layout!r}: pass layout="balanced"')
    if ring.ranks != args.world_size:
        held = f"{ring.ranks} of {args.world_size}"
        raise ValueError(f"tokens_per_rank plans for one ring of all ranks, and the ring has {held}: leave group out")
    if args.per_device_train_batch_size != 1:
        raise ValueError("tokens_per_rank packs each microbatch into one row: pass per_device_train_batch_size=1")
    if order not in ORDERS:
        raise ValueError(f"tokens_per_rank chooses the documents, and train_sampling_strategy is {order!r}: leave it out")
    length, seed = ring.ranks * tokens_per_rank, args.seed if args.data_seed is None else args.data_seed
    more: Any = {"shuffle": ORDERS[order], "epochs": None, "batch_tokens": args.gradient_accumulation_steps * length}
    return DatasetSettings("train_dataset", length, "balanced", ring.ranks, None, seed, **more)


def check_lengths(lengths: list[int], settings: DatasetSettings, tokens_per_rank: int) -> None:
    longest, tokens = max(lengths), sum(lengths)
    if longest > settings.length:
        raise ValueError(
            f"train_dataset has a document of {longest} tokens, and tokens_per_rank={tokens_per_rank} on {settings.ranks} ranks "
            f"holds {settings.length}: pass {-(-longest // settings.ranks)} or more, or cut the document"
        )
    assert settings.batch_tokens is not None
    if tokens < settings.batch_tokens:
        raise ValueError(
            f"train_dataset has {tokens} tokens, fewer than one step of {settings.batch_tokens // settings.length} microbatches "
            f"of {settings.length}: pass a smaller gradient_accumulation_steps or tokens_per_rank"
        )


def lengths_of(dataset: Any) -> list[int]:
    """Return the tokens of each document of a dataset. A table of Hugging Face datasets is not decoded for it."""
    if not hasattr(dataset, "__len__"):
        raise ValueError("tokens_per_rank plans documents of known lengths: pass a train_dataset with __len__, not a stream")
    row = dataset[0] if len(dataset) else {}
    if "input_ids" not in row or (len(row["input_ids"]) and not is_integer(row["input_ids"][0])):
        raise ValueError(
            "tokens_per_rank plans documents by input_ids, one list of token ids a row of train_dataset: pass such rows"
        )
    if "input_ids" not in getattr(dataset, "column_names", ()) or dataset.format["type"] == "custom":
        return [len(dataset[row]["input_ids"]) for row in range(len(dataset))]
    from pyarrow import compute  # type: ignore[import-not-found]

    column = dataset.select_columns(["input_ids"]).with_format("arrow")[:]["input_ids"]
    return compute.list_value_length(column).to_pylist()


class OneRow:
    """A data collator whose result must be one packed row of the documents, of at most ``capacity`` tokens."""

    def __init__(self, collate: Callable[[Any], Any], capacity: int) -> None:
        self._collate, self._capacity = collate, capacity

    def __call__(self, documents: list[Any]) -> Any:
        try:
            batch = self._collate(documents)
        except Exception as error:
            raise ValueError(f"{PACKING}. It raised: {error}") from error
        if not isinstance(batch, Mapping) or not {"position_ids", "cu_seq_lens_q"} & set(batch) or len(batch["input_ids"]) != 1:
            raise ValueError(PACKING)
        if (tokens := len(batch["input_ids"][0])) > self._capacity:
            raise ValueError(
                f"a planned row has {tokens} tokens, and a microbatch holds {self._capacity}: the documents were shorter when "
                "their lengths were read; let each row of train_dataset have the same tokens every time"
            )
        return batch
