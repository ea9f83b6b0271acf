"""The number of tokens that fit into a GPU in training, and a table of the memory that they take, by ``model/memory.py``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from ring_attn_core.model.config import TransformerConfig
    from ring_attn_core.model.memory import StepMemory, Term, Training


class MemoryOptions(NamedTuple):
    """The options of ``ring-attn plan --model``.
    ``memory``, ``host_memory``: GiB per GPU. ``tokens``: per GPU, None for the most that fit."""

    model: str
    gpus: int
    memory: float
    host_memory: float | None
    tokens: int | None
    activations: str


def answer(options: MemoryOptions) -> RenderableType:
    """Return a verdict, the most tokens per GPU or whether ``options.tokens`` fit, and a table of the memory that they take."""
    from rich.console import Group
    from rich.text import Text

    from ring_attn_core.model.memory import Training, longest, peak_memory, weights

    config = config_of(options.model)
    for name, size in (("memory", options.memory), ("host-memory", options.host_memory)):
        if size is not None and not 0 < size < 1e6:
            raise ValueError(f"--{name} must be a number of GiB above 0, got {size:g}")
    limit, host = _bytes(options.memory), None if options.host_memory is None else _bytes(options.host_memory)
    wanted = Training(gpus=options.gpus, tokens=1 if options.tokens is None else options.tokens, activations=options.activations)
    tokens = options.tokens or longest(config, wanted, limit, host)
    if not tokens:
        raise ValueError(_too_small(config, wanted, options))
    training = Training(gpus=options.gpus, tokens=tokens, activations=options.activations)
    memory = peak_memory(config, training)
    lines = [
        Text(f"{options.model}: {weights(config):,} weights, activations={training.activations!r}", style="bold"),
        Text(_verdict(options, training, memory)),
        Text(_fixed(training)),
    ]
    return Group(*lines, _table(memory))


def config_of(model: str) -> TransformerConfig:
    """Return the config of ``model``: a published model's name, or the path of a .json of this library or of Hugging Face."""
    from ring_attn_core.files import read_json
    from ring_attn_core.model.config import TransformerConfig
    from ring_attn_core.model.llama import config_of
    from ring_attn_core.model.shapes import shape

    if not model.endswith(".json"):
        return shape(model)
    found = read_json(Path(model))
    return config_of(found) if "model_type" in found else TransformerConfig.from_json(json.dumps(found))


def _verdict(options: MemoryOptions, training: Training, memory: StepMemory) -> str:
    from ring_attn_core.model.memory import total

    tokens, host = f"{training.tokens:,} tokens a GPU, {training.tokens * training.gpus:,} on {training.gpus}", total(memory.host)
    needed = f"{_gib(memory.peak)} GiB of {options.memory:g}" + (
        f" and {_gib(host)} GiB of the host for each GPU" if host else ""
    )
    if options.tokens is None:
        return f"at most {tokens}: {needed}"
    limit = options.host_memory
    fits = memory.peak <= _bytes(options.memory) and (limit is None or host <= _bytes(limit))
    return f"{tokens} {'fit' if fits else 'do not fit'}: {needed}"


def _fixed(training: Training) -> str:
    inputs = {
        "keep": "all activations",
        "recompute": "every block's input, out and lse",
        "offload": "two blocks' input, out and lse",
    }
    return f"on the GPU stay weights, gradients and moments, sharded over all of them, and {inputs[training.activations]}"


def _too_small(config: TransformerConfig, wanted: Training, options: MemoryOptions) -> str:
    from ring_attn_core.model.memory import peak_memory

    least = _gib(peak_memory(config, wanted).peak)
    host = "" if options.host_memory is None else f", or {options.host_memory:g} GiB of the host are too few"
    return f"{options.model} fits no 1,024 tokens a GPU: one token takes {least} GiB of {options.memory:g}{host}; take more GPUs"


def _table(memory: StepMemory) -> Table:
    from rich import box
    from rich.table import Table

    from ring_attn_core.model.memory import total

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("")

    def add(title: str, terms: Iterable[Term]) -> None:
        terms = [term for term in terms if term.size]
        table.add_row(_gib(total(terms)), title, "", style="bold")
        for term in terms:
            table.add_row(_gib(term.size), f"  {term.what}", term.words)

    add("all the time", memory.stays)
    add(f"at the worst moment: {memory.worst}", memory.moments[memory.worst])
    for name, terms in memory.moments.items():
        if name != memory.worst:
            table.add_row(_gib(total(terms)), f"not at once: {name}", "", style="dim")
    if memory.host:
        add("on the host, for each GPU", memory.host)
    return table


def _bytes(gib: float) -> int:
    return int(gib * 2**30)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
