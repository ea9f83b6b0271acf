"""``ring-attn compile``: the kernels of a model's attention, compiled into Triton's cache on any host, with or without a GPU.

A kernel depends on dtype, heads, features, the runs of a layout, the steps of a strategy and on whether rows are padded, not on
lengths and batches. So the problems of ``problems`` stand for all of a model's calls.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ring_attn_core.kernels.launch import Launch
    from ring_attn_core.problem.problem import Problem

TOKENS = 4096
"""Tokens of a shard. Any number stands for all: ``backends.launches`` adds the kernels of other lengths."""

ARRAYS = "extents", "key_extents", "key_mask", "sinks", "alibi_slopes", "dropout"
"""The features that are arrays, as ``--features`` names them."""


@dataclass(frozen=True)
class ModelAttention:
    """The attention layers of a model: dtype, heads, head sizes and features. ``softcap``: any number stands for all."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    v_dim: int = 128
    dtype: str = "bfloat16"
    softcap: float | None = None
    dropout_rate: float = 0.0
    arrays: frozenset[str] = frozenset()


class Report(NamedTuple):
    """The number of compiled kernels, those that the cache had, the bytes of all binaries, the seconds and the cache's folder."""

    kernels: int
    cached: int
    bytes: int
    seconds: float
    folder: str

    def __str__(self) -> str:
        new = self.kernels - self.cached
        return (
            f"{self.kernels} kernels, {self.bytes / 2**20:.1f} MiB of binaries in {self.folder}: "
            f"{self.cached} were there, {new} compiled in {self.seconds:.1f} s"
        )


def attention_of(model: str) -> ModelAttention:
    """Return the attention of ``model``: a published name, a config.json of this library or of Hugging Face, a train TOML.
    Only heads, softcap and sinks are read from a Hugging Face config."""
    from ..plan.memory import config_of

    if model.endswith(".toml"):
        from ..train.config import read

        config = read(Path(model)).transformer()
    elif model.endswith(".json") and "model_type" in (theirs := json.loads(Path(model).read_text("utf-8"))):
        theirs = theirs.get("text_config", theirs)
        heads = theirs["num_attention_heads"]
        size = theirs.get("head_dim") or theirs["hidden_size"] // heads
        sinks = frozenset({"sinks"} if theirs["model_type"] == "gpt_oss" else ())
        kv_heads, cap = theirs.get("num_key_value_heads") or heads, theirs.get("attn_logit_softcapping")
        return ModelAttention(heads, kv_heads, size, size, softcap=cap, arrays=sinks)
    else:
        config = config_of(model)
    arrays = {"sinks": config.sinks, "alibi_slopes": config.alibi, "dropout": config.dropout_rate > 0}
    sizes, dtype = (config.heads, config.kv_heads, config.head_dim, config.head_dim), config.compute_dtype or config.param_dtype
    features = config.softcap, config.dropout_rate, frozenset(name for name, has in arrays.items() if has)
    return ModelAttention(*sizes, dtype, *features)


def problems(attention: ModelAttention, gpu: str, ranks: int, layout: str, strategy: str) -> Iterator[Problem]:
    """Yield the problems whose kernels serve every length and batch: on a ring, one with padding and one without."""
    from ring_attn_core.plan.balanced import balanced_layout
    from ring_attn_core.problem.checks import OptionalArray
    from ring_attn_core.problem.options import Options
    from ring_attn_core.problem.problem import Problem

    capability = re.fullmatch(r"sm_(\d+)", gpu)
    if capability is None:
        raise ValueError(f"--gpu takes an architecture such as sm_90 (H100, H200), got {gpu!r}")
    for padded in (False, True)[: 1 if ranks == 1 else 2]:
        tokens, where = TOKENS, layout
        if layout == "balanced":
            where = balanced_layout([tokens * ranks - padded], ranks, seq_local=tokens)  # type: ignore[assignment]
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "extents": ((1, tokens, 2), "int32"),
            "key_extents": ((1, tokens, 2), "int32"),
            "key_mask": ((1, tokens), "bool"),
            "sinks": ((attention.heads,), "float32"),
            "alibi_slopes": ((attention.heads,), "float32"),
            "dropout_seed": ((), "int64"),
        }
        names = {"dropout_seed" if name == "dropout" else name for name in attention.arrays}
        names |= {"extents"} if layout == "balanced" else set()
        q, k = ((1, tokens, heads, attention.head_dim) for heads in (attention.heads, attention.kv_heads))
        v = (*k[:3], attention.v_dim)
        features: dict[str, Any] = {"softcap": attention.softcap, "dropout_rate": attention.dropout_rate}
        options = Options(layout=where, length=tokens * ranks - padded, strategy=strategy, **features)
        arrays = tuple(OptionalArray(name, *shapes[name]) for name in shapes if name in names)
        dtypes = attention.dtype, attention.dtype, attention.dtype
        problem = Problem(q, k, v, dtypes, "cuda", ranks, options, arrays, int(capability[1]), "torch")
        problem.check()
        yield problem


def kernels_of(found: Iterable[Problem]) -> list[Launch]:
    """Return a launch of each kernel that the problems need, both passes. Raise ValueError if no kernel runs them."""
    from ring_attn_core.kernels.backends import launches

    needed: dict[Any, Launch] = {}
    for problem in found:
        for launch in launches(problem):
            needed.setdefault(launch.specialization(problem.capability), launch)
    if not needed:
        raise ValueError("these calls run blockwise, without kernels: there is nothing to compile")
    return list(needed.values())


def compile_all(launches: list[Launch], capability: int, advance: Any = lambda: None) -> Report:
    """Compile the launches with all processors of this host; call ``advance`` after each. Raise Triton's errors."""
    from ring_attn_core.kernels.compile import cache_folder, compile_launch, is_cached, start

    began = time.perf_counter()
    cached = sum(is_cached(launch, capability) for launch in launches)
    start(launches, capability)
    size = 0
    for launch in launches:
        size += len(compile_launch(launch, capability).asm["cubin"])
        advance()
    return Report(len(launches), cached, size, time.perf_counter() - began, cache_folder())


def with_features(attention: ModelAttention, features: str) -> ModelAttention:
    """Return the attention with the features of a text such as ``extents,softcap``. Raise ValueError if one is unknown."""
    names = {name for name in features.split(",") if name}
    if unknown := names - {*ARRAYS, "softcap"}:
        raise ValueError(f"--features takes {', '.join(ARRAYS)} and softcap, got {min(unknown)!r}")
    return replace(
        attention,
        arrays=attention.arrays | names - {"softcap"},
        softcap=attention.softcap or (1.0 if "softcap" in names else None),
        dropout_rate=attention.dropout_rate or (0.5 if "dropout" in names else 0.0),
    )
