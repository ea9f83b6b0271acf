"""Training documents of a Trainer, planned: whole ones in one packed row, and equal compute in the microbatches of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler

from ring_attn_core.data.global_batches import GlobalBatches
from ring_attn_core.data.settings import DatasetSettings
from ring_attn_core.validation import in_words, is_integer


class PlannedRows(Sampler[list[int]]):
    """The documents of each microbatch, as rows of the dataset. ``steps``: how many steps the Trainer has made.

    An epoch is as many steps as the documents of the first one fill. A step's documents depend on its number alone, so a run
    goes on from a checkpoint with those that it would have had.
    """

    batch_size, drop_last = None, False  # read by accelerate

    def __init__(self, plan: GlobalBatches, microbatches: int, steps: Callable[[], int]) -> None:
        self._plan, self._microbatches, self._steps = plan, microbatches, steps

    def __len__(self) -> int:
        return self._plan.batches

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._steps() * self._microbatches // len(self)
        for number in range(epoch * len(self), (epoch + 1) * len(self)):
            yield [span.document for span in self._plan.batch(number)[0]]


def planned_loader(trainer: Any, tokens_per_rank: int) -> Any:
    """Return the loader of a Trainer's planned rows. Raise ValueError, naming the argument, if the Trainer cannot plan."""
    args, ring = trainer.args, trainer.ring
    if not is_integer(tokens_per_rank) or tokens_per_rank < 1:
        raise ValueError(f"tokens_per_rank must be an int of at least 1, got {in_words(tokens_per_rank)}")
    ways = {"random": True, "sequential": False}
    way = getattr(args, "train_sampling_strategy", "random")
    for wrong, remedy in (
        (ring.layout != "balanced", f'plans the balanced layout, and layout is {ring.layout!r}: pass layout="balanced"'),
        (
            ring.ranks != args.world_size,
            f"plans for one ring of all ranks, and the ring has {ring.ranks} of {args.world_size}: leave group out",
        ),
        (args.per_device_train_batch_size != 1, "packs each microbatch into one row: pass per_device_train_batch_size=1"),
        (way not in ways, f"chooses the order of documents, and train_sampling_strategy is {way!r}: pass random or sequential"),
    ):
        if wrong:
            raise ValueError(f"tokens_per_rank {remedy}")
    lengths, parts = lengths_of(trainer.train_dataset), args.gradient_accumulation_steps
    capacity, seed = ring.ranks * tokens_per_rank, args.seed if args.data_seed is None else args.data_seed
    if max(lengths) > capacity:
        raise ValueError(
            f"train_dataset has a document of {max(lengths)} tokens, and tokens_per_rank={tokens_per_rank} on {ring.ranks} ranks "
            f"holds {capacity}: pass {-(-max(lengths) // ring.ranks)} or more, or cut the document"
        )
    if sum(lengths) < parts * capacity:
        raise ValueError(
            f"train_dataset has {sum(lengths)} tokens, fewer than one step of {parts} microbatches of {capacity}: pass a smaller "
            "gradient_accumulation_steps or tokens_per_rank"
        )
    of = {"shuffle": ways[way], "epochs": None, "batch_tokens": parts * capacity}
    plan = GlobalBatches(lengths, DatasetSettings("train_dataset", capacity, "balanced", ring.ranks, None, seed, **of))
    loader = DataLoader(
        trainer.train_dataset,
        batch_sampler=PlannedRows(plan, parts, lambda: trainer.state.global_step),
        collate_fn=OneRow(trainer._get_collator_with_removed_columns(trainer.data_collator, "training")),
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        prefetch_factor=args.dataloader_prefetch_factor,
    )
    return trainer.accelerator.prepare(loader)


def lengths_of(dataset: Any) -> list[int]:
    """Return the tokens of each document of a dataset. A table of Hugging Face datasets is not decoded for it."""
    if not hasattr(dataset, "__len__"):
        raise ValueError("tokens_per_rank plans documents of known lengths: pass a train_dataset with __len__, not a stream")
    if not len(dataset) or "input_ids" not in dataset[0]:
        raise ValueError("tokens_per_rank plans documents by their input_ids, and train_dataset has none")
    if not hasattr(dataset, "select_columns"):
        return [len(dataset[row]["input_ids"]) for row in range(len(dataset))]
    from pyarrow import compute  # type: ignore[import-not-found]

    column = dataset.select_columns(["input_ids"]).with_format("arrow")[:]["input_ids"]
    return compute.list_value_length(column).to_pylist()


class OneRow:
    """A data collator whose result must be one packed row of the documents."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, documents: list[Any]) -> Any:
        batch = self._collate(documents)
        if len(batch["input_ids"]) != 1 or not {"position_ids", "cu_seq_lens_q"} & set(batch):
            raise ValueError(
                "tokens_per_rank packs the documents of a microbatch into one row, and the data collator does not: pass "
                "data_collator=DataCollatorWithFlattening(), or padding_free=True and max_length=None in trl's SFTConfig"
            )
        return batch
