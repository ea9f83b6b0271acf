"""The rates of one GPU: copy bandwidth, attention's forward, and a product of weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ring_attn_torch import ring_attention

from ..support.turns import copy_bandwidth, take_turns
from .problem import Problem, config_of


def run(problem: Problem, device: torch.device) -> dict[str, float]:
    """Return the rates of one GPU.

    Keys: "copy" in bytes/s, read and written; "attention" over two chunks and "product" of the MLP in operations/s.
    """
    config, tokens = config_of(problem), min(problem.tokens, 2 * problem.chunk)
    made = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16)
    q, k, v = (made(1, tokens, heads, config.head_dim) for heads in (config.heads, config.kv_heads, config.kv_heads))
    x, weight = made(problem.chunk, config.dim), made(config.hidden, config.dim)
    works = {"attention": lambda: ring_attention(q, k, v), "product": lambda: F.linear(x, weight)}
    with torch.no_grad():
        seconds = take_turns(works, 5)
    attention = 2 * tokens * (tokens + 1) * config.heads * config.head_dim
    product = 2 * problem.chunk * config.dim * config.hidden
    return {
        "copy": copy_bandwidth(),
        "attention": attention / seconds["attention"],
        "product": product / seconds["product"],
    }
