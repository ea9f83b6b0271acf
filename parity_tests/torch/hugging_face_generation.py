"""Text that transformers' generate() makes over a ring, and the logits that one process has for the same text."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import ring_attn_torch.transformers as hf

from .hugging_face import VOCAB, in_float64, make

PROMPT, NEW, PADDED = 23, 12, 5
CACHE = next(name for name in ("cache", "past_key_values") if name in inspect.signature(LlamaForCausalLM.forward).parameters)
"""The name of a cache in transformers: "cache" since its release 5.24."""
MODELS = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "chunks": {"prefill_chunk_size": 4},
    "sampled": {"do_sample": True, "top_k": 9},
    "beams": {"num_beams": 3},
}


class Text(NamedTuple):
    """Prompts and what followed, int [rows, tokens]; and the logits float [rows, new, vocab] of what followed, as generated."""

    ids: np.ndarray
    logits: np.ndarray | None


def prompts() -> dict[str, Tensor]:
    """Two rows, one of them padded on the left."""
    ids = torch.randint(3, VOCAB, (2, PROMPT), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :PADDED] = ids[1, :PADDED] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, given: dict[str, Tensor], **options: Any) -> Text:
    """Return the text of ``model.generate``."""
    torch.manual_seed(1)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "output_logits": True}
    with in_float64():
        out = model.generate(**given, **{**settings, "return_dict_in_generate": True, **options})
    beams = "num_beams" in options  # whose logits are of rows that have been put aside
    return Text(out.sequences.numpy(), None if beams else torch.stack(out.logits, 1).numpy())


def over_a_ring(group: Any, name: str, layout: str, ways: list[str], padded: bool = True) -> list[Text]:
    """The text of ``prompts`` in each of the ``ways``; what a process of the pool runs."""
    model, given = make(name).eval(), prompts() if padded else {"input_ids": prompts()["input_ids"]}
    with hf.sequence_parallel(model, group, layout):
        return [generated(model, given, **WAYS[way]) for way in ways]


def alone(name: str, text: Text, new: int = NEW) -> np.ndarray:
    """The logits of eager attention on one process for the last ``new`` tokens, a row at a time, without cache or padding."""
    model, rows = make(name).eval(), []
    with torch.no_grad(), in_float64():
        for row, padded in enumerate((0, PADDED)):
            ids = torch.from_numpy(text.ids[row : row + 1, padded:-1])
            rows.append(model(input_ids=ids, use_cache=False).logits[0, -new:])
    return torch.stack(rows).numpy()
