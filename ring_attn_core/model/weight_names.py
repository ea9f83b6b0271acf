"""Names of weights: a check that a state (a dict of weights by name) fits a module, and Hugging Face's names of Llama weights."""

from __future__ import annotations

from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]

MADE = "Build the module with the sizes the state was made with"

OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
"""RingTransformer's names of the weights outside its blocks, each with Hugging Face's name."""

INSIDE = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
"""Names of modules inside a block, such as ``blocks.0``, each with Hugging Face's name inside ``model.layers.0``."""


def llama_name(name: str) -> str:
    """Return Hugging Face's name of a weight of a RingTransformer, such as ``model.layers.0.mlp.up_proj.weight``."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, layer, inner = name.split(".", 2)
    module, kind = inner.rsplit(".", 1)
    return f"model.layers.{layer}.{INSIDE[module]}.{kind}"


def check_state(expected: Shapes, got: Shapes, what: str = "the state", remedy: str = MADE, most: int | None = None) -> None:
    """Raise ValueError if parameters are missing, unexpected or of another shape; list ``most`` of them, None: all."""
    problems = [f"{name} is missing" for name in expected if name not in got]
    problems += [f"{name} is unexpected" for name in got if name not in expected]
    problems += [
        f"{name} is {list(got[name])} and must be {list(shape)}"
        for name, shape in expected.items()
        if name in got and tuple(got[name]) != tuple(shape)
    ]
    if problems:
        listed = "; ".join(problems[:most])
        more = f"; and {len(problems) - most} more" if most is not None and len(problems) > most else ""
        raise ValueError(f"{what} does not fit this module: {listed}{more}. {remedy}")
