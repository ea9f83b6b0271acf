"""Loading and saving of Llama, Mistral, Qwen2 and Qwen3 models in the Hugging Face folder format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.model.llama import THEIRS
from ring_attn_core.model.source_folder import files_of
from ring_attn_core.model.weight_names import llama_name

from ..layers.transformer import RingTransformer
from ..ring.groups import ring_of
from .saved_weights import load_folder, save_folder


def load_llama(
    folder: str | Path, *, dtype: torch.dtype | str | None = None, compute_dtype: torch.dtype | str | None = None, **ring: Any
) -> RingTransformer:
    """Load a Llama, Mistral, Qwen2 or Qwen3 model from a Hugging Face folder as a RingTransformer, on the default device.

    ``folder``: as ``save_pretrained`` writes it, with ``config.json`` and one safetensors file, or several with an index. Logits
    equal those of transformers up to rounding. Tied heads, sliding windows and the rotary scalings "linear", "llama3" and "yarn"
    are supported, and recorded in ``model.config``. A window of ``w`` tokens in Hugging Face is ``w - 1`` here, because Hugging
    Face counts the query's own token.

    ``dtype``: the dtype of the weights; None: the dtype in config.json, or float32 if config.json has none. ``compute_dtype``:
    the dtype of the computation; None: the dtype of the weights. ``ring``: arguments of ``RingTransformer.from_config``, such as
    ``group`` and ``layout``. Every rank of the group must make this call. Each rank reads the files itself, one weight at a time.

    Raise ValueError if the architecture is none of these four, or needs a feature that RingTransformer lacks, such as quantised
    weights or "dynamic" rotary scaling. Raise it too if a file is missing, truncated or a pickle, or if weights do not fit the
    config; the error names these files or weights. The error is the same on every rank, and is raised before any weight is read,
    unless a file is overwritten during the load.
    """
    return load_folder(folder, THEIRS, (dtype, compute_dtype), ring)


def save_llama(
    model: nn.Module,
    folder: str | Path,
    *,
    length: int | None = None,
    source: str | Path | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
) -> None:
    """Save a RingTransformer as a Llama, Mistral, Qwen2 or Qwen3 model that transformers loads.

    The architecture is Qwen3 if the model has ``qk_norm``, Qwen2 if its only biases are ``qkv_bias``, Mistral if it has windows,
    else Llama. ``length``: the maximum number of tokens in a sequence, written as ``max_position_embeddings``. None: the value in
    ``model.config.published``, which ``load_llama`` sets, or else 131072. ``source``: the Hugging Face folder from which the
    model was loaded. The folder's tokenizer is copied. If the folder's config.json names the same architecture, its entries that
    the model does not determine are copied too. None: no tokenizer is written. ``group``, shards and ``folder``: as in
    :func:`save_weights`.

    Raise ValueError if none of the four architectures supports the model. All four need causal masks, windows of one size, and
    the same rotary embedding (but not NTK's) in all layers. No architecture has softcap, sinks or ALiBi. The model's biases must
    be those of one architecture. Raise it too if ``source`` has no config.json or tokenizer, or more token ids than the model.
    :func:`save_weights` has further errors.
    """
    save_folder(model, folder, lambda config: files_of(config, length, source), llama_name, ring_of(group))
