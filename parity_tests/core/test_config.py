"""A model's config: to JSON and back, what is filled in, what differs between layers, and what is refused."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from ring_attn_core import Band, causal, full, sliding_window
from ring_attn_core.model.config import AttentionConfig, TransformerConfig
from ring_attn_core.model.llama import config_of
from ring_attn_core.model.rotary import NTK, Linear, Llama3, Rotary, YaRN

SIZES: dict[str, Any] = {"vocab": 31, "dim": 24, "depth": 2, "heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "sizes alone": {},
    "no positions": {"rotary_base": None, "alibi": True},
    "short form": {"rotary_base": 5e5, "mask": full()},
    "linear": {"rotary": Rotary(scaling=Linear(4.0)), "mask": sliding_window(9, 2)},
    "ntk": {"rotary": Rotary(1e5, NTK(2))},
    "yarn": {"rotary": Rotary(1e6, YaRN(4.0, 32768, mscale=1.0, mscale_all=0.7, truncate=False))},
    "everything": {
        "kv_heads": 2,
        "head_dim": 8,
        "hidden": 40,
        "mask": causal(3),
        "windows": [5, None],
        "rotary": Rotary(5e5, Llama3(8.0, 1.0, 4.0, 8192)),
        "rotaries": [Rotary(1e6, Linear(8.0)), 1e4],
        "qk_norm": True,
        "qkv_bias": True,
        "eps": 1e-5,
        "softcap": 30.0,
        "sinks": True,
        "dropout_rate": 0.1,
        "tied": False,
        "param_dtype": "float32",
        "compute_dtype": "bfloat16",
    },
    "mixers": {"mixers": ["mamba2", "gated_delta_net"]},
}
LARGE = ("vocab", "dim", "heads", "kv_heads", "head_dim", "hidden")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_goes_to_json_and_back(name):
    config = TransformerConfig(**SIZES | CONFIGS[name])
    again = TransformerConfig.from_json(config.to_json())
    assert again == config
    assert hash(again) == hash(config)
    assert again.to_json() == config.to_json()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_arguments_of_a_config_make_it_again(name):
    config = TransformerConfig(**SIZES | CONFIGS[name])
    assert TransformerConfig(**config.arguments) == replace(config) == config
    for layer in range(config.depth):
        attention = config.attention(layer)
        assert AttentionConfig(**attention.arguments) == attention


def test_json_has_every_field_and_what_it_leaves_out_has_its_default():
    config = TransformerConfig(**SIZES)
    assert json.loads(config.to_json()).keys() == {x.name for x in fields(TransformerConfig)}
    assert TransformerConfig.from_json(json.dumps(SIZES)) == config


def test_open_sizes_are_filled_in():
    config = TransformerConfig(**SIZES, rotary_base=5e5, windows=[3, None])
    assert (config.kv_heads, config.head_dim, config.hidden) == (4, 6, 64)
    assert config.rotary == Rotary(5e5)
    assert config.windows == (3, None)
    scaled = TransformerConfig(**SIZES, rotary=Rotary(1e6, Linear(2.0)))
    assert scaled.rotary_base == 1e6
    assert TransformerConfig(**SIZES, rotary_base=None).rotary is None


def test_layers_differ_in_their_masks_and_rotary_embeddings():
    sizes: dict[str, Any] = SIZES | {"depth": 3}
    config = TransformerConfig(**sizes, windows=[4, None, 7], rotaries=[1e4, Rotary(1e6, Linear(8.0)), None])
    layers = [config.attention(layer) for layer in range(3)]
    assert [x.mask for x in layers] == [Band(0, 4), Band(0, None), Band(0, 7)]
    assert [x.rotary for x in layers] == [Rotary(1e4), Rotary(1e6, Linear(8.0)), None]
    assert [x.rotary_base for x in layers] == [1e4, 1e6, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(SIZES | {"experts": 8}), "TransformerConfig has no 'experts', .* it has vocab, dim, depth"),
        (json.dumps(SIZES | {"experts": 8, "router": 1}), "has no 'experts', 'router'"),
        (json.dumps(SIZES | {"type": "Band"}), "has no 'type'"),
        (json.dumps(SIZES | {"rotary": {"type": "Rotary", "theta": 1e4}}), "Rotary has no 'theta'"),
        (json.dumps(SIZES | {"mask": {"type": "Band", "lo": "x"}}), "lo of a Band must be an int, .*, or null, got 'x'"),
        (json.dumps(SIZES | {"rotary": {"type": "LongRope"}}), "has the type Band or .*, got 'LongRope'"),
        (json.dumps(SIZES | {"rotary": {"type": "Rotary", "scaling": {"type": "Linear"}}}), "Linear needs 'factor'"),
        (json.dumps({"vocab": 31, "dim": 24}), "TransformerConfig needs 'depth', 'heads', and the JSON leaves it out"),
        ("[31, 24]", "is read from a JSON object, as to_json writes it, got a list"),
        ("dim: 24", "TransformerConfig is read from JSON, as to_json writes it, got 'dim: 24'"),
        (None, "TransformerConfig is read from JSON"),
    ],
)
def test_json_that_is_not_a_config_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig.from_json(text)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"qk_norm": 1}, "qk_norm must be True or False, got 1"),
        ({"qkv_bias": None}, "qkv_bias must be True or False, got None"),
        ({"tied": "yes"}, "tied must be True or False, got 'yes'"),
        ({"eps": 0}, "eps of RMSNorm must be a number above 0 and below 1, got 0"),
        ({"param_dtype": "int8"}, "param_dtype must be one of float32, bfloat16, float16, float64, .*, got 'int8'"),
        ({"compute_dtype": "half"}, "compute_dtype must be one of .*, got 'half'"),
        ({"rotaries": 1e4}, "rotaries must be a list of one value for each of 2 layers, .*, got 10000.0"),
        ({"rotary": 1e4}, r"rotary must be Rotary\(base, scaling\) or None, got 10000.0: a base alone is rotary_base="),
        ({"rotary": Rotary(1e6), "rotary_base": 1e5}, "rotary_base=100000.0 contradicts rotary="),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"head_dim": 2, "rotary": Rotary(1e4, NTK(2.0))}, "head_dim=2 has no other"),
        ({"head_dim": 7, "rotary_base": None, "rotaries": [None, 1e4]}, "head_dim must be even, got 7"),
        ({"depth": 10**30}, "depth must be at most 10000, got 1000000000000000000000000000000: pass a smaller one"),
        ({"depth": 10_001}, "depth must be at most 10000, got 10001"),
        *(({name: 2**31}, f"{name} must be at most 2147483647, got 2147483648: pass a smaller one") for name in LARGE),
        *(({name: 10**30}, f"{name} must be at most 2147483647, got 10{29 * '0'}") for name in LARGE),
        ({"heads": 2**16, "head_dim": 2**16}, r"heads \* head_dim must be at most 2147483647, got 4294967296"),
        ({"rotary_base": 10**400}, "the base of rotary embeddings must be greater than 1"),
        ({"softcap": 10**400}, "softcap must be a Python number"),
    ],
)
def test_a_config_that_fits_no_model_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**SIZES | sizes)


def test_many_layers_are_a_config_within_seconds():
    deep: dict[str, Any] = SIZES | {"depth": 10_000, "windows": [3] * 10_000, "mlp_chunk": 10**30}
    config = TransformerConfig(**deep)
    assert config.attention(9_999).mask == Band(0, 3)


THEIRS: dict[str, Any] = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
THEIRS |= {"model_type": "llama", "intermediate_size": 64, "max_position_embeddings": 64}
NUMBERS: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 6, "rms_norm_eps": 1e-6, "attention_dropout": 0.1}
SCALED: dict[str, Any] = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0}
SCALED |= {"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0, "partial_rotary_factor": 1.0}


@pytest.mark.parametrize("name", SCALED)
def test_null_in_a_hugging_face_scaling_is_a_missing_key(name):
    scaling = {"rope_type": "yarn"} | SCALED
    missing = {key: x for key, x in scaling.items() if key != name}
    assert config_of(THEIRS | {"rope_parameters": scaling | {name: None}}) == config_of(THEIRS | {"rope_parameters": missing})


@pytest.mark.parametrize("name", [*SCALED, *NUMBERS])
@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan")], ids=["huge", "minus huge", "inf", "nan"])
def test_numbers_out_of_all_range_in_a_hugging_face_config_are_refused_in_words(name, value):
    changed = {"rope_parameters": {"rope_type": "yarn"} | SCALED | {name: value}} if name in SCALED else {name: value}
    assert config_of(THEIRS | NUMBERS | {"rope_parameters": {"rope_type": "yarn"} | SCALED}).depth == 2
    with pytest.raises(ValueError, match=r"must (be|turn)|is the share of"):
        config_of(THEIRS | NUMBERS | changed)
