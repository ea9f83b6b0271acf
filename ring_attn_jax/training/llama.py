"""Folders of Hugging Face's Llama, Mistral, Qwen2 and Qwen3 models, read and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ring_attn_core.model.llama import config_of, ignored_names, their_config
from ring_attn_core.model.weight_files import CONFIG, current, read_json
from ring_attn_core.model.weight_names import llama_name

from ..layers.transformer import RingTransformer
from .ranks import together
from .saved_weights import described, filled, save_folder, transformer_in, with_dtypes


def load_llama(folder: str | Path, *, dtype: Any = None, compute_dtype: Any = None, **ring: Any) -> RingTransformer:
    """Make a RingTransformer of a Llama, Mistral, Qwen2 or Qwen3 model in Hugging Face's layout.

    ``folder``: what ``save_pretrained`` writes or a download has, ``config.json`` and safetensors files, one or several with an
    index. Logits are those of transformers. Rotary scalings "linear", "llama3" and "yarn", sliding windows (Hugging Face's ``w``
    is ``w - 1`` here, for it counts the token itself) and tied heads are taken over; ``model.config`` says all of it.

    ``dtype``: in which to keep the weights; None is what config.json says. ``compute_dtype``: in which to compute, None as the
    weights. ``ring``: the arguments of ``RingTransformer.from_config``, such as ``mesh`` and ``layout``, but ``rngs``. Weights
    are placed as :func:`load_weights` places them.

    Raises ValueError for another architecture, for what our layers do not compute (quantised weights, biases of o, "dynamic"
    rotary scaling), for a file that is missing, truncated or a pickle, and for weights that do not fit the config, naming
    them: the same in every process of the mesh.
    """
    with together(ring.get("mesh")):
        place = current(folder)
        config = config_of(read_json(place / CONFIG))
        empty = described(place, with_dtypes(config, dtype, compute_dtype), llama_name, ignored_names(config), ring)
    return filled(empty)


def save_llama(model: RingTransformer, folder: str | Path, *, length: int = 131072) -> None:
    """Save a RingTransformer so that transformers loads it: as Llama, Mistral (windows), Qwen2 (biases) or Qwen3 (qk_norm).

    ``length``: the longest sequence, in tokens, that other programs should allow: their ``max_position_embeddings``. No tokenizer
    is written and ``eos_token_id`` is left open. All else is as in :func:`save_weights`. Raises ValueError for what none of the
    four computes: softcap, sinks, ALiBi, a mask that is not causal, windows of several sizes, NTK or no rotary embedding.
    """
    inner = transformer_in(model)
    save_folder(inner, folder, json.dumps(their_config(inner.config, length), indent=2), llama_name)
