"""The training loop, and the interface that PyTorch and JAX implement for it. It logs to ``log.jsonl`` and TensorBoard."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ring_attn_core.data.passkey import passkey

from .arithmetic import edges, flops_per_token, peak, rates
from .config import Config
from .events import Events
from .folder import differences

if TYPE_CHECKING:
    from ring_attn_core.model.config import TransformerConfig
    from ring_attn_core.model.progress import ResumePoint


class TrainStep(NamedTuple):
    loss: float
    """Mean over all labels of the step, in nats."""
    norm: float
    """Global norm of the gradients before clipping."""


class RunDevices(NamedTuple):
    """The devices of a run: the name of one, their number, and one's peak memory so far, in bytes."""

    device: str
    devices: int
    memory: int


def measure_process() -> int:
    """Return the peak memory of this process in bytes, for devices without memory statistics, such as CPUs."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Trainer(Protocol):
    """The model, optimizer and data of this process, in one framework; all processes call each method together.
    ``data`` yields microbatches, each a ``Shard``. ``first``: True in the process that writes the log."""

    first: bool
    model_config: TransformerConfig
    parameters: int
    trained: int
    """Number of the weights that the optimizer updates; with LoRA, those of the adapters."""
    data: Any
    """The ``SequenceShardedDataset`` of the training data; ``held_out`` is that of the held-out files."""
    held_out: Any

    def open(self) -> None:
        """Open the data and the folder of checkpoints, which a step alone does not need."""
        ...

    def resume(self) -> ResumePoint | None: ...

    def save(self, step: int, data: str) -> None: ...

    def finish(self) -> None:
        """Wait for the checkpoint in progress and save the weights; with LoRA, first save and merge the adapters."""
        ...

    def shard(self, ids: list[list[int]], labels: list[list[int]]) -> Any:
        """Return the microbatch of the global rows ``ids`` and ``labels``; each row is one document."""
        ...

    def step(self, number: int, microbatches: list[Any]) -> TrainStep:
        """Run one optimizer step; ``number`` counts from 0."""
        ...

    def losses(self, microbatch: Any, ends: list[int]) -> Iterable[tuple[float, int]]:
        """Return (sum of the losses, number of labels) of each bucket of positions, over all ranks.
        A token is in the first bucket whose exclusive end in ``ends`` exceeds the number of tokens before it in its document."""
        ...

    def wrong(self, microbatch: Any) -> list[int]:
        """Count the wrong predictions in each global row: labels that are not the model's most probable token."""
        ...

    def machine(self) -> RunDevices: ...


LOG = "log.jsonl"
Tell = Callable[[str, dict[str, Any]], None]
"""A function ``tell(kind, values)`` that shows a line of the log, such as ("step", {"step": 1, "loss": 5.5, ...})."""


def train(config: Config, trainer: Trainer, tell: Tell) -> None:
    """Train from the newest checkpoint, if there is one, to the last step; evaluate, save and log as configured.
    The process in which ``trainer.first`` is True writes the log, and passes each line to ``tell``."""
    trainer.open()
    progress = trainer.resume()
    begin = progress.step if progress else 0
    if progress and progress.data:
        try:
            trainer.data.resume(progress.data)
        except ValueError as error:
            raise ValueError(
                f"{config.out} holds a run of other [data]: put them back, or pass another --out ({error})"
            ) from error
    path, now = Path(config.out, LOG), config.to_dict()
    runs = [line["config"] for line in lines(path) if line["kind"] == "run"] if begin and trainer.first else []
    log = Log(path, begin, tell) if trainer.first else lambda kind, **values: None
    weights = {"parameters": trainer.parameters, "trained": trainer.trained, "frozen": trainer.parameters - trainer.trained}
    changed = differences(runs[-1], now) if runs else []
    log("run", step=begin, **weights, **trainer.machine()._asdict(), config=now, changed=changed)
    batches, step_rates = iter(trainer.data), rates(config.optimizer, config.steps)
    for step in range(begin, config.steps):
        began = time.perf_counter()
        done = trainer.step(step, microbatches(config, trainer, step, batches))
        seconds = time.perf_counter() - began
        log("step", step=step + 1, loss=done.loss, norm=done.norm, rate=step_rates[step], **speed(config, trainer, seconds))
        last = step + 1 == config.steps
        if last or (step + 1) % config.evaluation.every == 0:
            log("evaluation", step=step + 1, **evaluate(config, trainer))
            for length in config.passkey.lengths:
                log("passkey", step=step + 1, length=length, accuracy=find_passkeys(config, trainer, length))
        if last or (step + 1) % config.save_every == 0:
            trainer.save(step + 1, trainer.data.state())
    trainer.finish()


def microbatches(config: Config, trainer: Trainer, step: int, batches: Iterator[Any]) -> list[Any]:
    every, number = config.passkey.train_every, config.microbatches
    if every == 0 or (step + 1) % every:
        return list(islice(batches, number))
    first = step * number * config.rows
    starts = range(first, first + number * config.rows, config.rows)
    return [passkeys(config, trainer, config.data.length, start) for start in starts]


def passkeys(config: Config, trainer: Trainer, length: int, first: int, purpose: str = "train") -> Any:
    """Return texts with passkeys, whose answers alone have labels. ``purpose``: enters the seeds of training and tests."""
    seeds = range(first, first + config.rows)
    texts = [passkey(length, f"{config.seed} {purpose} {seed}", config.passkey.digits) for seed in seeds]
    return trainer.shard([list(each.text) for each in texts], [each.labels for each in texts])


def find_passkeys(config: Config, trainer: Trainer, length: int) -> float:
    """Return the fraction of test texts whose passkey the model finds by giving each correct digit the highest probability."""
    wrong: list[int] = []
    for first in range(0, config.passkey.texts, config.rows):  # whole batches only: another size would compile again
        wrong += trainer.wrong(passkeys(config, trainer, length, first, "test"))
    return wrong[: config.passkey.texts].count(0) / config.passkey.texts


def evaluate(config: Config, trainer: Trainer) -> dict[str, Any]:
    """Return a log line with the mean held-out loss in nats, overall (``loss``) and by bucket of positions (``by_position``).
    Bucket i holds the ``labels`` of tokens with ``ends[i - 1]`` to ``ends[i] - 1`` tokens of their document before them in the
    packed row."""
    ends = edges(config.data.length, config.evaluation.buckets)
    sums, counts = [0.0] * len(ends), [0] * len(ends)
    for microbatch in islice(trainer.held_out, config.evaluation.batches):
        for bucket, (total, count) in enumerate(trainer.losses(microbatch, ends)):
            sums[bucket] += total
            counts[bucket] += count
    by_position = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    return {"loss": sum(sums) / max(1, sum(counts)), "ends": ends, "by_position": by_position, "labels": counts}


def speed(config: Config, trainer: Trainer, seconds: float) -> dict[str, Any]:
    """Return tokens/s and model TFLOP/s of all devices, MFU (None if the peak is unknown), and a device's peak bytes."""
    machine, frozen = trainer.machine(), trainer.parameters - trainer.trained
    flops = flops_per_token(trainer.parameters, config.data.length, trainer.model_config, frozen)
    rate, most = config.tokens / seconds, peak(machine.device)
    tflops = rate * flops / 1e12
    mfu = None if most is None else tflops / (most * machine.devices)
    return {"tokens_per_second": rate, "tflops": tflops, "mfu": mfu, "memory": machine.memory}


class Log:
    """A writer of ``log.jsonl`` and of TensorBoard's events, which shows each line by ``tell``.
    ``begin``: the resumed step, or 0. Old lines after it are dropped; the others go to a new file, which is renamed over the
    log."""

    def __init__(self, path: Path, begin: int, tell: Tell) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in lines(path) if begin and line["step"] <= begin]
        new = path.with_name(f".{path.name}.new")  # a kill leaves the old log or the new one
        new.write_text("".join(json.dumps(line) + "\n" for line in kept))
        new.replace(path)
        self._path, self._tell, self._events = path, tell, Events(path.parent, begin)

    def __call__(self, kind: str, **values: object) -> None:
        """Append ``kind`` and ``values`` to the file as a line of JSON. Pass the line to TensorBoard's events and to ``tell``."""
        line = {"kind": kind, **values}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._events(kind, line)
        self._tell(kind, line)


def lines(path: Path) -> list[dict[str, Any]]:
    """Parse the lines of a log up to the first that is not JSON, such as a line that a kill cut short."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found
