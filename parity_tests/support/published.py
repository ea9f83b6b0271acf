"""Tiny models and rotary scalings in transformers' terms and in ours, with the results that transformers computed.

The file published.json holds these results, so the tests run transformers only to check that they still hold. To record them
anew:

    python -m parity_tests.support.published
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.rotary import NTK, Linear, Llama3, Rotary, YaRN
from ring_attn_core.model.weight_names import llama_name

from .models import VOCAB, Arrays, transformer_weights

FILE = Path(__file__).with_suffix(".json")

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn"}
SCALINGS: dict[str, tuple[int, Rotary, dict[str, Any]]] = {
    "none": (16, Rotary(10000.0), {"rope_type": "default"}),
    "linear": (16, Rotary(10000.0, Linear(4.0)), {"rope_type": "linear", "factor": 4.0}),
    "ntk": (16, Rotary(10000.0, NTK(5.5)), {"rope_type": "dynamic", "factor": 2.0, "tokens": 6656}),  # 2 * 6656 / 2048 - 1
    "yarn": (64, Rotary(1e6, YaRN(4.0, 32768)), YARN | {"factor": 4.0, "original": 32768}),
    "yarn, as DeepSeek": (
        64,
        Rotary(10000.0, YaRN(40.0, 4096, mscale=1.0, mscale_all=0.7)),
        YARN | {"factor": 40.0, "original": 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "yarn, all arguments": (
        32,
        Rotary(500.0, YaRN(8.0, 512, fast=16.0, slow=2.0, attention_factor=1.5, truncate=False)),
        YARN | {"factor": 8.0, "original": 512, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5, "truncate": False},
    ),
    "yarn, nothing kept": (16, Rotary(10000.0, YaRN(2.0, 6)), YARN | {"factor": 2.0, "original": 6}),
    "llama 3.1": (128, Rotary(5e5, Llama3(8.0, 1.0, 4.0, 8192)), LLAMA3 | {"factor": 8.0, "original": 8192}),
    "llama 3.2": (64, Rotary(5e5, Llama3(32.0, 1.0, 4.0, 8192)), LLAMA3 | {"factor": 32.0, "original": 8192}),
}
"""The head_dim, our record, and rope_parameters of transformers; "original" is short for original_max_position_embeddings."""

SIZES: dict[str, Any] = {"dim": 24, "depth": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 40}
THEIR_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama": (
        {"rotary": Rotary(100.0, Llama3(8.0, 1.0, 4.0, 32)), "eps": 1e-5, "tied": False},
        {"rms_norm_eps": 1e-5, "rope_parameters": LLAMA3 | {"rope_theta": 100.0, "factor": 8.0, "original": 32}},
    ),
    "Mistral": (
        {"rotary_base": 1000.0, "windows": (4, 4), "eps": 1e-5, "tied": False},
        {"rms_norm_eps": 1e-5, "sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    ),
    "Qwen2": (
        {"dim": 32, "rotary_base": 1000.0, "windows": (None, 4), "qkv_bias": True},
        {
            "hidden_size": 32,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "Qwen3": (
        {"rotary": Rotary(100.0, YaRN(4.0, 16)), "qk_norm": True},
        {"tie_word_embeddings": True, "rope_parameters": YARN | {"rope_theta": 100.0, "factor": 4.0, "original": 16}},
    ),
}
"""Our config and that of transformers, besides SIZES and THEIR_SIZES. A window of 5 there counts the token itself."""

TOKENS, LOOKED_AT = 13, slice(0, None, 4)
"""The number of tokens in a row, and the slice of them whose logits are recorded."""


def config_of(name: str) -> TransformerConfig:
    return TransformerConfig(vocab=VOCAB, **SIZES | MODELS[name][0])


def weights_of(name: str) -> Arrays:
    """Return random weights, under our names."""
    config = config_of(name)
    return transformer_weights(**config.arguments)


def ids() -> np.ndarray:
    return np.random.default_rng(8).integers(0, VOCAB, (1, TOKENS)).astype(np.int32)


def recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def their_logits(name: str) -> np.ndarray:
    """Return the logits of transformers with the same weights."""
    return logits_of(their_model(name))


def logits_of(model: Any) -> np.ndarray:
    """Return the recorded slice of the logits of a model of transformers."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(ids()).long()).logits[0, LOOKED_AT].numpy()


def their_model(name: str) -> Any:
    """Return the model in transformers with the same weights."""
    import torch

    transformers = import_module("transformers")
    config = transformers.AutoConfig.for_model(name.lower(), **_in_full(THEIR_SIZES | MODELS[name][1]))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    weights = {llama_name(weight): torch.from_numpy(x) for weight, x in weights_of(name).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing  # if the head is the embedding
    assert not unexpected, unexpected
    model.tie_weights()
    return model


def their_frequencies(name: str) -> tuple[np.ndarray, float]:
    """Return transformers' values of a scaling: inverse frequencies, float32 [head_dim / 2], and the attention factor."""
    head_dim, rotary, theirs = SCALINGS[name]
    theirs = dict(theirs)
    tokens, kind = theirs.pop("tokens", None), theirs["rope_type"]
    if kind == "default":
        return 1 / np.float32(rotary.base) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)), 1.0
    parameters = theirs | {"rope_theta": rotary.base}
    sizes = {"hidden_size": head_dim, "num_attention_heads": 1, "max_position_embeddings": 2048}
    config = import_module("transformers").LlamaConfig(**sizes, **_in_full({"rope_parameters": parameters}))
    functions = import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    frequencies, factor = functions[kind](config, device="cpu", seq_len=tokens)
    return frequencies.numpy(), float(factor)


def _in_full(arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = dict(arguments["rope_parameters"])
    if "original" in parameters:
        parameters["original_max_position_embeddings"] = parameters.pop("original")
    return arguments | {"rope_parameters": parameters}


def record() -> None:
    found: dict[str, Any] = {"transformers": import_module("transformers").__version__, "scalings": {}, "logits": {}}
    for name in SCALINGS:
        frequencies, factor = their_frequencies(name)
        found["scalings"][name] = {"frequencies": frequencies.tolist(), "attention_factor": factor}
    for name in MODELS:
        found["logits"][name] = their_logits(name).tolist()
    rounded = lambda x: float(f"{x:.9g}")
    FILE.write_text(json.dumps(json.loads(json.dumps(found), parse_float=lambda x: rounded(float(x)))) + "\n")


if __name__ == "__main__":
    record()
