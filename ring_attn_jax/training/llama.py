"""Loading and saving of Llama, Mistral, Qwen2 and Qwen3 models in the Hugging Face folder format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ring_attn_core.model.llama import THEIRS
from ring_attn_core.model.source_folder import files_of
from ring_attn_core.model.weight_names import llama_name

from ..layers.transformer import RingTransformer
from .saved_weights import load_folder, save_folder


def load_llama(folder: str | Path, *, dtype: Any = None, compute_dtype: Any = None, **ring: Any) -> RingTransformer:
    """Load a Llama, Mistral, Qwen2 or Qwen3 model from a Hugging Face folder as a RingTransformer.

    ``folder``: as ``save_pretrained`` writes it, with ``config.json`` and one safetensors file, or several with an index. Logits
    equal those of transformers up to rounding. Tied heads, sliding windows and the rotary scalings "linear", "llama3" and "yarn"
    are supported, and recorded in ``model.config``. A window of ``w`` tokens in Hugging Face is ``w - 1`` here, because ``w``
    counts the query's own token.

    ``dtype``: the dtype of the weights; None: that of config.json, or float32. ``compute_dtype``: the dtype of the computation,
    None for the weights' own. ``ring``: the arguments of ``RingTransformer.from_config``, such as ``mesh`` and ``layout``, but
    not ``rngs``. With ``mesh`` the weights are copied to all of its devices, else to the default device.

    Raise ValueError if the architecture is none of these four, or needs a feature that our layers lack (quantised weights,
    "dynamic" rotary scaling). Raise it too if a file is missing, truncated or a pickle, or if weights do not fit the config. The
    error names such files or weights. The error is the same in each process if the mesh spans all processes.
    """
    return load_folder(folder, THEIRS, (dtype, compute_dtype), ring)


def save_llama(
    model: RingTransformer, folder: str | Path, *, length: int | None = None, source: str | Path | None = None
) -> None:
    """Save a RingTransformer so that transformers loads it: as Llama, Mistral (windows), Qwen2 (qkv_bias) or Qwen3 (qk_norm).

    ``length``: the maximum tokens of a sequence, written as ``max_position_embeddings``. None: the value in
    ``model.config.published``, where ``load_llama`` stores it, or else 131072. ``source``: the Hugging Face folder that the
    model came from. Its tokenizer is copied. If it has the same architecture, the entries of its config.json that do not follow
    from the model are copied too. None: no tokenizer is written. Shards are gathered and ``folder`` is replaced as in
    :func:`save_weights`.

    Raise ValueError if none of the four architectures supports the model. Examples are softcap, sinks, ALiBi, a mask that is not
    causal, windows of several sizes, NTK or no rotary embedding, rotary embeddings that differ between layers, and biases in
    other places. Raise it too if ``source`` has no config.json or tokenizer, or has more token ids than the model. Raise also
    what :func:`save_weights` raises.
    """
    save_folder(model, folder, lambda config: files_of(config, length, source), llama_name)
