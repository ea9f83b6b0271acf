"""What is generated, of which weights, and where."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ring_attn_core.mistakes import is_integer
from ring_attn_core.model.generation import check_ids
from ring_attn_core.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of ``ring-attn generate``; ``stop`` None: what ends a text by the folder's config.json, if it says so."""

    weights: Path
    prompt: Path
    framework: str = "torch"
    ranks: int = 1
    new: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: tuple[int, ...] | None = None
    chunk: int | None = None
    tokenizer: Path | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.framework not in ("jax", "torch"):
            raise ValueError(f"unknown framework {self.framework!r}: choose one of jax, torch")
        Sampling(self.temperature, self.top_k, self.top_p, self.seed)  # which says what is wrong with them
        for name, count in (("--max-new-tokens", self.new), ("--chunk", self.chunk)):
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if not self.prompt.is_file():
            raise ValueError(f"{self.prompt} is no file: write into one what the text begins with")
        if self.ranks < 1:
            raise ValueError(f"--ranks must be at least 1, got {self.ranks}")
        if not (self.weights / "config.json").is_file():
            raise ValueError(
                f"{self.weights} is no folder with a config.json: pass one that save_weights or Hugging Face has written, such "
                "as the folder weights in that of a run of ring-attn train"
            )
        self.check_ids([x for x in self.ends if is_integer(x)], "eos_token_id of config.json" if self.stop is None else "--stop")

    @property
    def config(self) -> dict[str, Any]:
        """Return what the folder's config.json holds; ValueError where it cannot be read."""
        try:
            config = json.loads((self.weights / "config.json").read_text())
        except ValueError as error:
            raise ValueError(f"{self.weights / 'config.json'} is no JSON: {error}") from error
        return config if isinstance(config, dict) else {}

    def check_ids(self, ids: list[int], whose: str) -> None:
        """ValueError, before any weights are loaded, for ids outside the vocabulary, where config.json says how large it is."""
        vocab = self.config.get("vocab_size" if self.llama else "vocab")
        if isinstance(vocab, int):
            check_ids(ids, vocab, f"{whose} holds")

    @property
    def llama(self) -> bool:
        """Return whether the folder is one of Hugging Face's."""
        return "model_type" in self.config

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the ids that end the text."""
        if self.stop is not None:
            return self.stop
        told = self.config.get("eos_token_id") if self.llama else None
        return tuple(told) if isinstance(told, list) else () if told is None else (told,)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``RingTransformer.generate`` but its prompts and functions."""
        sampling = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "seed": self.seed}
        return {"max_new_tokens": self.new, "stop": self.ends, "chunk": self.chunk, **sampling}
