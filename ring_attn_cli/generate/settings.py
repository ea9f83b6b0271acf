"""The options of ``ring-attn generate`` as a checked record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ring_attn_core.files import read_json
from ring_attn_core.model.checks import DTYPES
from ring_attn_core.model.generation import check_ids
from ring_attn_core.sampling import Sampling
from ring_attn_core.validation import is_integer

from ..processes import check_count

SAMPLING = "temperature", "top_k", "top_p", "seed"


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """The options of ``ring-attn generate``, by their names on the command line.
    Text, tokenizer and weights are checked later, by the functions that read them. An empty ``stop``: ``eos_token_id`` of a
    Hugging Face config."""

    weights: Path
    prompt: str | None = None
    prompt_file: Path | None = None
    framework: str = "torch"
    ranks: int = 1
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: Sequence[int] | None = None
    chunk: int | None = None
    tokenizer: Path | None = None
    dtype: str | None = None
    shard_weights: bool = False

    def __post_init__(self) -> None:
        if self.framework not in ("jax", "torch"):
            raise ValueError(f"unknown framework {self.framework!r}: choose one of jax, torch")
        if self.shard_weights and self.framework != "jax":
            raise ValueError("--shard-weights is for JAX, and in PyTorch each rank holds all weights: pass --framework jax")
        Sampling(*(getattr(self, name) for name in SAMPLING))  # checks the values
        for option in ("max_new_tokens", "chunk", "ranks"):
            if (count := getattr(self, option)) is not None and count < 1:
                raise ValueError(f"--{option.replace('_', '-')} must be at least 1, got {count}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.prompt is None and self.prompt_file is None:
            raise ValueError("pass what the text begins with: --prompt TEXT, or --prompt-file FILE")
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("--prompt and --prompt-file were both passed: leave one of them out")
        if self.prompt_file is not None and not self.prompt_file.is_file():
            raise ValueError(f"{self.prompt_file} is not a file: pass a file with the prompt, or --prompt TEXT")
        check_count(self.ranks, "--ranks")
        if not (self.weights / "config.json").is_file():
            raise ValueError(
                f"{self.weights} is not a folder with a config.json: pass one that save_weights or Hugging Face has written, "
                "such as the folder weights in that of a run of ring-attn train"
            )
        self.check_ids([x for x in self.ends if is_integer(x)], "--stop" if self.stop else "eos_token_id of config.json")

    @property
    def origin(self) -> str:
        """Return "--prompt", or the path of the prompt's file, to name the prompt in messages."""
        return "--prompt" if self.prompt_file is None else str(self.prompt_file)

    def read_prompt(self) -> str:
        try:
            text = self.prompt or "" if self.prompt_file is None else self.prompt_file.read_text(encoding="utf-8")
            text.encode()  # raises on surrogates, which stand for arguments that are not UTF-8
        except UnicodeError as error:
            raise ValueError(f"{self.origin} is not UTF-8 text ({error}): save it as UTF-8, the prompt is text") from error
        if not text:
            verb = "pass" if self.prompt_file is None else "write into it"
            raise ValueError(f"{self.origin} is empty: {verb} what the text begins with")
        return text

    @property
    def config(self) -> dict[str, Any]:
        return read_json(self.weights / "config.json")

    @property
    def llama(self) -> bool:
        return "model_type" in self.config

    def check_ids(self, ids: list[int], whose: str) -> None:
        """Raise ValueError if an id is outside the vocabulary, if its size is known. ``whose``: the ids' source in words."""
        vocab = self.config.get("vocab_size" if self.llama else "vocab")
        if isinstance(vocab, int):
            check_ids(ids, vocab, f"{whose} holds")

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the stop token ids: ``stop`` if there are any, else ``eos_token_id`` of a Hugging Face config.json, else ()."""
        ids: Any = self.stop or (self.config.get("eos_token_id") if self.llama else None)
        return () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (ids,)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``RingTransformer.generate``, except prompts, ``cache_dtype`` and callbacks."""
        return {name: getattr(self, name) for name in (*SAMPLING, "max_new_tokens", "chunk")} | {"stop": self.ends}
