"""Folders of Hugging Face's Llama, Mistral, Qwen2 and Qwen3 models, read and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ring_attn_core.model.llama import THEIRS, their_config
from ring_attn_core.model.weight_names import llama_name

from ..layers.transformer import RingTransformer
from .saved_weights import load_folder, save_folder


def load_llama(folder: str | Path, *, dtype: Any = None, compute_dtype: Any = None, **ring: Any) -> RingTransformer:
    """Make a RingTransformer of a Llama, Mistral, Qwen2 or Qwen3 model in Hugging Face's layout.

    ``folder``: what ``save_pretrained`` writes or a download has, ``config.json`` and safetensors files, one or several with an
    index. Logits are those of transformers. Rotary scalings "linear", "llama3" and "yarn", sliding windows (Hugging Face's ``w``
    is ``w - 1`` here, for it counts the token itself) and tied heads are taken over; ``model.config`` says all of it.

    ``dtype``: in which to keep the weights; None is what config.json says. ``compute_dtype``: in which to compute, None as the
    weights. ``ring``: the arguments of ``RingTransformer.from_config``, such as ``mesh`` and ``layout``, but ``rngs``. Weights
    are placed as :func:`load_weights` places them.

    Raises ValueError for another architecture, for what our layers do not compute (quantised weights, "dynamic" rotary
    scaling), for a file that is missing, truncated or a pickle, and for weights that do not fit the config, naming
    them: the same in every process of the mesh.
    """
    return load_folder(folder, THEIRS, (dtype, compute_dtype), ring)


def save_llama(model: RingTransformer, folder: str | Path, *, length: int | None = None) -> None:
    """Save a RingTransformer so that transformers loads it: as Llama, Mistral (windows), Qwen2 (qkv_bias) or Qwen3 (qk_norm).

    ``length``: the longest sequence, in tokens, that other programs should allow: their ``max_position_embeddings``. None: what
    ``model.config.published`` says, which ``load_llama`` keeps together with the special ids, or else 131072. No tokenizer is
    written. All else is as in :func:`save_weights`. Raises ValueError for what none of the four computes: softcap, sinks, ALiBi,
    a mask that is not causal, windows of several sizes, NTK or no rotary embedding, biases in other places.
    """
    save_folder(model, folder, lambda config: json.dumps(their_config(config, length), indent=2), llama_name)
