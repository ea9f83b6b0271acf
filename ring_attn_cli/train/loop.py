"""The training loop of PyTorch and JAX: resume, step, evaluate, save, and log to ``log.jsonl`` and TensorBoard."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ring_attn_core.data.passkey import passkey

from .arithmetic import edges, flops_per_token, peak, rates
from .config import Config
from .events import Events
from .folder import differences
from .side import Side

LOG = "log.jsonl"
Tell = Callable[[str, dict[str, Any]], None]
"""A function ``tell(kind, values)`` that shows a line of the log, such as ("step", {"step": 1, "loss": 5.5, ...})."""


def train(config: Config, side: Side, tell: Tell) -> None:
    """Train from the newest checkpoint, if there is one, to the last step; evaluate, save and log as configured.
    The process in which ``side.first`` is True writes the log, and passes each line to ``tell``."""
    progress = side.resume()
    begin = progress.step if progress else 0
    if progress and progress.data:
        try:
            side.data.resume(progress.data)
        except ValueError as error:
            raise ValueError(
                f"{config.out} holds a run of other [data]: put them back, or pass another --out ({error})"
            ) from error
    path, described = Path(config.out, LOG), json.loads(json.dumps(config.described()))
    runs = [line for line in lines(path) if line["kind"] == "run"] if begin and side.first else []
    changed = differences(runs[-1]["config"], described) if runs else []
    log = Log(path, begin, tell) if side.first else lambda kind, **values: None
    machine = side.machine()._asdict()
    weights = {"parameters": side.parameters, "trained": side.trained, "frozen": side.parameters - side.trained}
    log("run", step=begin, **weights, **machine, config=described, changed=changed)
    batches, of_steps = iter(side.data), rates(config.optimizer, config.steps)
    for step in range(begin, config.steps):
        began = time.perf_counter()
        done = side.step(step, microbatches(config, side, step, batches))
        seconds = time.perf_counter() - began
        log("step", step=step + 1, loss=done.loss, norm=done.norm, rate=of_steps[step], **speed(config, side, seconds))
        last = step + 1 == config.steps
        if last or (step + 1) % config.evaluation.every == 0:
            log("evaluation", step=step + 1, **evaluation(config, side))
            for length in config.passkey.lengths:
                log("passkey", step=step + 1, length=length, accuracy=accuracy(config, side, length))
        if last or (step + 1) % config.save_every == 0:
            side.save(step + 1, side.data.state())
    side.finish()


def microbatches(config: Config, side: Side, step: int, batches: Iterator[Any]) -> list[Any]:
    """Take the microbatches of a step from ``batches``; in every ``train_every``-th step, make passkey texts instead."""
    every, number = config.passkey.train_every, config.data.accumulate
    if every == 0 or (step + 1) % every:
        return list(itertools.islice(batches, number))
    first = (step * number) * config.rows
    return [
        passkeys(config, side, config.data.length, range(at, at + config.rows))
        for at in range(first, first + number * config.rows, config.rows)
    ]


def passkeys(config: Config, side: Side, length: int, seeds: range, purpose: str = "train") -> Any:
    """Return a microbatch of texts of ``length`` tokens with passkeys, one for each of ``seeds``; only the answers have labels.
    ``purpose``: a word that enters each seed, so that training and tests have different texts."""
    texts = [passkey(length, f"{config.seed} {purpose} {seed}", config.passkey.digits) for seed in seeds]
    return side.shard([list(each.text) for each in texts], [each.labels for each in texts])


def accuracy(config: Config, side: Side, length: int) -> float:
    """Return the fraction of test texts whose passkey the model finds by giving each correct digit the highest probability."""
    wrong: list[int] = []
    rows, texts = config.rows, config.passkey.texts
    for first in range(0, texts, rows):  # whole batches only: another size would compile again
        wrong += side.wrong(passkeys(config, side, length, range(first, first + rows), "test"))
    return sum(each == 0 for each in wrong[:texts]) / texts


def evaluation(config: Config, side: Side) -> dict[str, Any]:
    """Return a log line with the mean held-out loss in nats, overall (``loss``) and by bucket of positions (``by_position``).
    Bucket ``i`` holds the ``labels`` of tokens with ``ends[i - 1]`` (first: 0) to ``ends[i] - 1`` tokens of their document before
    them in the packed row; its loss is None without labels."""
    ends = edges(config.data.length, config.evaluation.buckets)
    sums, counts = [0.0] * len(ends), [0] * len(ends)
    for microbatch in itertools.islice(side.held_out, config.evaluation.batches):
        for bucket, (total, count) in enumerate(side.losses(microbatch, ends)):
            sums[bucket] += total
            counts[bucket] += count
    by_position = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    return {"loss": sum(sums) / max(1, sum(counts)), "ends": ends, "by_position": by_position, "labels": counts}


def speed(config: Config, side: Side, seconds: float) -> dict[str, Any]:
    """Return tokens/s and model TFLOP/s of all devices, MFU, and the peak memory of one device in bytes.
    MFU is the model TFLOP/s divided by the peak TFLOP/s of all devices, or None if the peak is unknown."""
    machine = side.machine()
    frozen = side.parameters - side.trained
    tflops = config.tokens / seconds * flops_per_token(side.parameters, config.data.length, side.config, frozen) / 1e12
    most = peak(machine.device)
    mfu = None if most is None else tflops / (most * machine.devices)
    return {"tokens_per_second": config.tokens / seconds, "tflops": tflops, "mfu": mfu, "memory": machine.memory}


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
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found
