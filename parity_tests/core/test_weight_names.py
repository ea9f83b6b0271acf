"""Tests of Hugging Face's names of our weights."""

from __future__ import annotations

from ring_attn_core.model.weight_names import llama_name


def test_weights_have_the_names_that_others_gave_them():
    """Said here once more: reading and writing by the same wrong table would be read and written well."""
    inside = {
        "attention_norm.weight": "input_layernorm.weight",
        "attention.q.weight": "self_attn.q_proj.weight",
        "attention.k.bias": "self_attn.k_proj.bias",
        "attention.v.weight": "self_attn.v_proj.weight",
        "attention.o.weight": "self_attn.o_proj.weight",
        "attention.q_norm.weight": "self_attn.q_norm.weight",
        "attention.k_norm.weight": "self_attn.k_norm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        "mlp.gate.weight": "mlp.gate_proj.weight",
        "mlp.up.weight": "mlp.up_proj.weight",
        "mlp.down.weight": "mlp.down_proj.weight",
    }
    for ours, theirs in inside.items():
        assert llama_name(f"blocks.12.{ours}") == f"model.layers.12.{theirs}"
    outside = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    assert all(llama_name(f"{ours}.weight") == f"{theirs}.weight" for ours, theirs in outside.items())
