"""The number of tokens that fit into a GPU in training, and a table of the memory that they take, by ``model/memory.py``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ring_attn_core.files import read_json
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.llama import config_of as read_llama
from ring_attn_core.model.memory import StepMemory, Term, Training, longest, peak_memory, total, weights
from ring_attn_core.model.shapes import shape

STAYS = {
    "keep": "all activations",
    "recompute": "every block's input, out and lse",
    "offload": "two blocks' input, out and lse",
}


class MemoryOptions(NamedTuple):
    """The options of ``ring-attn plan --model``: memory in GiB per GPU, tokens per GPU (None: the most that fit)."""

    model: str
    gpus: int
    memory: float
    host_memory: float | None
    tokens: int | None
    activations: str


def answer(options: MemoryOptions) -> RenderableType:
    """Return a verdict, the most tokens per GPU or whether ``options.tokens`` fit, and a table of the memory that they take."""
    config = config_of(options.model)
    for name, size in (("memory", options.memory), ("host-memory", options.host_memory)):
        if size is not None and not 0 < size < 1e6:
            raise ValueError(f"--{name} must be a number of GiB above 0, got {size:g}")
    limit, host = int(options.memory * 2**30), None if options.host_memory is None else int(options.host_memory * 2**30)
    wanted = Training(gpus=options.gpus, tokens=1 if options.tokens is None else options.tokens, activations=options.activations)
    tokens = options.tokens or longest(config, wanted, limit, host)
    if not tokens:
        least = _gib(peak_memory(config, wanted).peak)
        few = "" if host is None else f", or {options.host_memory:g} GiB of the host are too few"
        raise ValueError(
            f"{options.model} fits no 1,024 tokens a GPU: one token takes {least} GiB of {options.memory:g}{few}; take more GPUs"
        )
    memory = peak_memory(config, replace(wanted, tokens=tokens))
    offloaded = total(memory.host)
    verdict = f"{tokens:,} tokens a GPU, {tokens * options.gpus:,} on {options.gpus}"
    if options.tokens is None:
        verdict = f"at most {verdict}"
    else:
        fits = memory.peak <= limit and (host is None or offloaded <= host)
        verdict += " fit" if fits else " do not fit"
    verdict += f": {_gib(memory.peak)} GiB of {options.memory:g}"
    verdict += f" and {_gib(offloaded)} GiB of the host for each GPU" if offloaded else ""
    return Group(
        Text(f"{options.model}: {weights(config):,} weights, activations={options.activations!r}", style="bold"),
        Text(verdict),
        Text("on the GPU stay weights, gradients and moments, sharded over all of them, and " + STAYS[options.activations]),
        _table(memory),
    )


def config_of(model: str) -> TransformerConfig:
    """Return the config of ``model``: a published model's name, or the path of a .json of this library or of Hugging Face."""
    if not model.endswith(".json"):
        return shape(model)
    found = read_json(Path(model))
    return read_llama(found) if "model_type" in found else TransformerConfig.from_json(json.dumps(found))


def _table(memory: StepMemory) -> Table:
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


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
