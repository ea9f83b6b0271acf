"""Conversion between Hugging Face configs of Llama, Mistral, Qwen2 and Qwen3 and the equivalent TransformerConfig.

A Hugging Face config is a dict, as in config.json. Its keys that ``llama.py`` does not name are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..validation import in_words
from .checks import DEEPEST, check_sizes
from .config import TransformerConfig
from .published import Published
from .rotary import Linear, Llama3, Rotary, YaRN
from .weight_files import CONFIG, Naming, WeightFolder, differ
from .weight_names import llama_name

Theirs = Mapping[str, Any]


class Family(NamedTuple):
    """An architecture: its class in transformers, its features, and its defaults for keys that are missing in a config."""

    architecture: str
    qk_norm: bool
    qkv_bias: bool
    biased: tuple[str, ...]
    """The keys that the architecture reads: none, one or both of attention_bias (for q, k, v and o) and mlp_bias."""
    defaults: Theirs


FAMILIES = {
    "llama": Family("LlamaForCausalLM", False, False, ("attention_bias", "mlp_bias"), {}),
    "mistral": Family("MistralForCausalLM", False, False, (), {"num_key_value_heads": 8}),
    "qwen2": Family("Qwen2ForCausalLM", False, True, (), {"num_key_value_heads": 32}),
    "qwen3": Family("Qwen3ForCausalLM", True, False, ("attention_bias",), {"num_key_value_heads": 32, "head_dim": 128}),
}
"""The architectures, by the ``model_type`` of a Hugging Face config."""

SIZES = {
    "vocab_size": "vocab",
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "intermediate_size": "hidden",
}
"""Required sizes of a Hugging Face config, each with its name in TransformerConfig."""

FIXED = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "quantization_config": None}
"""Keys of a Hugging Face config that must be missing, null or these values; the layers of this package support no others."""

PUBLISHED = "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"
"""Keys of a Hugging Face config that TransformerConfig.published keeps, although the computation does not use them."""

LENGTH = 131072
"""The default of ``max_position_embeddings``: the longest sequence, in tokens, that other programs should allow."""

TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "max_position_embeddings": (int, "an int"),
    "original_max_position_embeddings": (int, "an int"),
    "sliding_window": (int, "an int"),
    "max_window_layers": (int, "an int"),
    "layer_types": (list, "a list of one text a layer"),
    "attention_dropout": ((int, float), "a number"),
    "rope_scaling": (Mapping, "an object"),
    "rope_parameters": (Mapping, "an object"),
    "tie_word_embeddings": (bool, "true or false"),
    "use_sliding_window": (bool, "true or false"),
    "attention_bias": (bool, "true or false"),
    "mlp_bias": (bool, "true or false"),
    "bos_token_id": (int, "an int"),
    "eos_token_id": ((int, list), "an int or a list of ints"),
    "pad_token_id": (int, "an int"),
}
"""The type that a key of a Hugging Face config must have, unless it is missing or null, and the type's name in messages."""


def config_of(theirs: Theirs) -> TransformerConfig:
    kind = theirs.get("model_type")
    if kind is None and "vocab" in theirs:
        raise ValueError("this folder was written by save_weights: read it with load_weights")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}, got {kind!r}")
    family = FAMILIES[kind]
    missing = [name for name in SIZES if name not in theirs]
    if missing:
        raise ValueError(f"the config of a {kind} model must have {', '.join(missing)}")
    check_sizes(**{name: theirs[name] for name in SIZES})
    check_sizes(DEEPEST, num_hidden_layers=theirs["num_hidden_layers"])
    for name, needed in FIXED.items():
        if theirs.get(name, needed) not in (needed, None):
            raise ValueError(f"{name} of a {kind} model must be {needed!r}, got {theirs[name]!r}: our layers do not compute that")
    for name, (kinds, words) in TYPES.items():
        value = theirs.get(name)
        if value is not None and (isinstance(value, bool) != (kinds is bool) or not isinstance(value, kinds)):
            raise ValueError(f"{name} of a {kind} model must be {words}, got {in_words(value)}: restore config.json")
    biases = {name: bool(theirs.get(name)) for name in ("attention_bias", "mlp_bias")}
    strange = [name for name, present in biases.items() if present and name not in family.biased]
    if strange:
        raise ValueError(f"{strange[0]} of a {kind} model must be False, got True: {family.architecture} has none")
    get = lambda name, default=None: theirs.get(name, family.defaults.get(name, default))
    said: dict[str, Any] = {name: theirs[name] for name in PUBLISHED if theirs.get(name) is not None}
    return TransformerConfig(
        **{ours: theirs[name] for name, ours in SIZES.items()},
        kv_heads=get("num_key_value_heads"),
        head_dim=get("head_dim"),
        windows=_windows(kind, theirs, get("sliding_window", 4096), get("max_window_layers", 28)),
        rotary=_rotary(theirs),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or biases["attention_bias"],
        o_bias=biases["attention_bias"],
        mlp_bias=biases["mlp_bias"],
        eps=get("rms_norm_eps", 1e-6),
        dropout_rate=get("attention_dropout") or 0.0,
        tied=bool(get("tie_word_embeddings", False)),
        param_dtype=get("dtype") or get("torch_dtype") or "float32",
        published=Published(**said) if said else None,
    )


def ignored_names(config: TransformerConfig) -> tuple[str, ...]:
    """Return patterns of weight names that a reader ignores: rotary frequencies, and the copied head of a tied model."""
    return ("*.rotary_emb.inv_freq", "lm_head.weight") if config.tied else ("*.rotary_emb.inv_freq",)


def _config_in(held: WeightFolder) -> TransformerConfig:
    """Return the config of a Hugging Face folder; untied, as in transformers, if the weights hold a head of their own."""
    try:
        config = config_of(held.config)
    except ValueError as error:
        raise ValueError(f"{held.folder / CONFIG}: {error}") from error
    return replace(config, tied=config.tied and not differ(held, "model.embed_tokens.weight", "lm_head.weight"))


THEIRS = Naming(_config_in, llama_name, ignored_names)
"""The format of Hugging Face's folders: how to read the config, name weights, and tell which weights to ignore."""


def their_config(config: TransformerConfig, length: int | None = None) -> dict[str, Any]:
    """Return the Hugging Face config of an equivalent model. ``length``: max_position_embeddings; None: published, or LENGTH."""
    windows = _check_windows(config)
    if length is not None:
        check_sizes(length=length)
    kind = _kind(config, windows)
    published = config.published or Published()
    sizes = {w + 1 for w in windows if w is not None}  # Hugging Face counts the token itself
    if len(sizes) > 1 or (kind == "mistral" and None in windows):
        raise ValueError(
            f"windows={windows} fit no {kind} model, which has one size of window{' in all layers' * (kind == 'mistral')}: keep "
            "this model with save_weights"
        )
    found: dict[str, Any] = {"architectures": [FAMILIES[kind].architecture], "model_type": kind}
    found |= {name: getattr(config, ours) for name, ours in SIZES.items()}
    found |= {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        "attention_dropout": config.dropout_rate,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": length or published.max_position_embeddings or LENGTH,
        "sliding_window": max(sizes, default=None),
        **{name: getattr(published, name) for name in PUBLISHED if name != "max_position_embeddings"},
        "torch_dtype": config.param_dtype,
    }
    biases = {"attention_bias": config.o_bias, "mlp_bias": config.mlp_bias}
    found |= {name: biases[name] for name in FAMILIES[kind].biased}
    found |= _their_rotary(config.rotary)
    if kind in ("qwen2", "qwen3"):
        slides = [w is not None for w in windows]
        first = slides.index(True) if any(slides) else config.depth
        found |= {
            "use_sliding_window": any(slides),
            "max_window_layers": first,  # read by releases before layer_types
            "layer_types": ["sliding_attention" if x else "full_attention" for x in slides],
        }
    return found


def _kind(config: TransformerConfig, windows: list[int | None]) -> str:
    """Return the ``model_type`` that has the norms, biases and windows of ``config``. Raise ValueError if none has."""
    biases = config.qkv_bias, config.o_bias, config.mlp_bias
    if config.qk_norm:
        kind, known = "qwen3", biases in ((False, False, False), (True, True, False))
    elif biases == (True, False, False):
        kind, known = "qwen2", True
    elif any(biases) or not any(x is not None for x in windows):
        kind, known = "llama", config.qkv_bias == config.o_bias and not any(x is not None for x in windows)
    else:
        kind, known = "mistral", True
    if not known:
        names = [name for name in ("qk_norm", "qkv_bias", "o_bias", "mlp_bias", "windows") if getattr(config, name)]
        raise ValueError(
            f"no Llama, Mistral, Qwen2 or Qwen3 computes {', '.join(names)} and no other bias: keep this model with save_weights"
        )
    return kind


def _windows(kind: str, theirs: Theirs, window: int | None, first: int | None) -> tuple[int | None, ...] | None:
    """Return each layer's window (earlier tokens that a query sees; None: all); None if no layer has one.
    ``window``: tokens that a query sees, itself included. ``first``: the first layer with one if ``layer_types`` is missing."""
    depth = theirs["num_hidden_layers"]
    if kind == "llama" or window is None or (kind != "mistral" and not theirs.get("use_sliding_window", False)):
        return None
    layers = theirs.get("layer_types")
    if kind == "mistral":
        slides = [True] * depth
    elif layers is None:
        slides = [layer >= (first or 0) for layer in range(depth)]
    else:
        slides = [layer == "sliding_attention" for layer in layers]
    return tuple(window - 1 if x else None for x in slides) if any(slides) else None


def _rotary(theirs: Theirs) -> Rotary:
    """Return the rotary embedding from ``rope_parameters``, or from an older config's ``rope_scaling`` and ``rope_theta``."""
    scaling = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    if any(isinstance(x, Mapping) for x in scaling.values()):
        raise ValueError(f"rope_parameters must be one for all layers, got {', '.join(scaling)}")
    if scaling.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(f"rope_parameters must turn whole heads, got partial_rotary_factor {scaling['partial_rotary_factor']}")
    base = scaling.get("rope_theta") or theirs.get("rope_theta") or 10000.0
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    most = theirs.get("max_position_embeddings")
    original = theirs.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings") or most
    always = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    needs = always.get(kind, ("factor",) if kind == "yarn" and not most else ())
    missing = [name for name in needs if scaling.get(name) is None]
    if missing:
        raise ValueError(f"rope_type {kind!r} needs {', '.join(missing)}, got {dict(scaling)}")
    if kind in ("default", "linear"):
        return Rotary(base, Linear(scaling["factor"]) if kind == "linear" else None)
    if kind == "llama3":
        factor, low, high = (scaling[name] for name in needs)
        return Rotary(base, Llama3(factor, low, high, original))  # type: ignore[arg-type]
    if kind == "yarn":
        check_sizes(original_max_position_embeddings=original)  # type: ignore[arg-type]
        scales = scaling.get("mscale"), scaling.get("mscale_all_dim")
        mscale, mscale_all = scales if all(scales) else (None, None)  # transformers ignores either alone
        factor = most / original if scaling.get("factor") is None else scaling["factor"]  # type: ignore[operator]
        fast, slow = scaling.get("beta_fast") or 32.0, scaling.get("beta_slow") or 1.0
        attention, truncate = scaling.get("attention_factor"), scaling.get("truncate", True)
        return Rotary(base, YaRN(factor, original, fast, slow, attention, mscale, mscale_all, truncate))  # type: ignore[arg-type]
    raise ValueError(
        f"rope_type must be default, linear, llama3 or yarn, got {kind!r}: set another in config.json. What is called dynamic "
        "changes with the length of a call, and up to max_position_embeddings is default"
    )


def _their_rotary(rotary: Rotary | None) -> dict[str, Any]:
    """Return ``rope_parameters`` for a config.json, and ``rope_theta`` and ``rope_scaling`` for older transformers releases."""
    assert rotary is not None, "a model without positions was refused"
    scaling = rotary.scaling
    if isinstance(scaling, Linear):
        found: dict[str, Any] = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3):
        found = {"rope_type": "llama3", "factor": scaling.factor, "original_max_position_embeddings": scaling.original}
        found |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    elif isinstance(scaling, YaRN):
        found = {"rope_type": "yarn", "factor": scaling.factor, "original_max_position_embeddings": scaling.original}
        found |= {"beta_fast": scaling.fast, "beta_slow": scaling.slow, "truncate": scaling.truncate}
        more = {"attention_factor": scaling.attention_factor, "mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all}
        found |= {name: x for name, x in more.items() if x is not None}
    else:
        found = {"rope_type": "default"}
    with_base = found | {"rope_theta": rotary.base}
    return {"rope_theta": rotary.base, "rope_parameters": with_base} | ({"rope_scaling": with_base} if scaling else {})


def _check_windows(config: TransformerConfig) -> list[int | None]:
    """Return each layer's window, as in ``_windows``. Raise ValueError if ``config`` has a setting that transformers lacks."""
    layers = [config.attention(layer) for layer in range(config.depth)]
    refused = [name for name in ("softcap", "sinks", "alibi") if getattr(config, name)]
    refused += ["mask"] * any(x.mask.lo != 0 for x in layers) + ["rotaries"] * any(x.rotary != config.rotary for x in layers)
    refused += ["rotary_base=None"] * (config.rotary is None) + ["mixers"] * (config.mixers is not None)
    if not isinstance(scaling := config.rotary and config.rotary.scaling, Linear | Llama3 | YaRN | None):
        refused.append(f"the scaling {type(scaling).__name__}")
    if refused:
        raise ValueError(f"no Llama, Mistral, Qwen2 or Qwen3 computes {', '.join(refused)}: keep this model with save_weights")
    return [x.mask.hi for x in layers]
