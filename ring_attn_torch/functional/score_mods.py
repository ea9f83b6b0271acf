"""The score_mods of ``flex_attention`` that the ring supports: softcap and ALiBi, made by functions or recognised by tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ring_attn_core.validation import in_words

from .shards import Arguments

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of (score, batch row, head, q_pos, k_pos) that returns the new score."""

COMMUTING = ("aten.add.Tensor", "aten.mul.Tensor")


def softcap(cap: float) -> ScoreMod:
    """Return the score_mod ``cap tanh(score / cap)`` (Gemma 2), for this package's ``flex_attention`` and for torch's."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


def alibi(slopes: Tensor) -> ScoreMod:
    """Return the score_mod ``score + slopes[h] (k_pos - q_pos)`` (ALiBi), for this package's ``flex_attention`` and torch's.

    ``slopes``: a float tensor [heads] of constants.
    """

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    return score_mod


def arguments_of(score_mod: Any, device: torch.device) -> Arguments:
    """Convert a score_mod to arguments of ``ring_attention``: for each constant c in its graph, compare with ``softcap(c)``,
    ``alibi(c)``."""
    if score_mod is None:
        return {}
    if not callable(score_mod):
        raise ValueError(f"score_mod must be a function of (score, b, h, q_idx, kv_idx), got {in_words(score_mod)}")
    if torch.compiler.is_compiling():
        raise ValueError("score_mod is read by tracing it, which torch.compile cannot: call ring_attention with softcap=")
    try:
        graph, constants = _traced(score_mod, device)
    except Exception as error:
        raise ValueError(f"score_mod cannot be traced, {error}: {INSTEAD}") from error
    for constant in constants:
        if isinstance(constant, float | int) and graph == _traced(softcap(constant), device)[0]:
            return {"softcap": float(constant)}
        if isinstance(constant, Tensor) and constant.ndim == 1 and graph == _traced(alibi(constant), device)[0]:
            if constant.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"score_mod has slopes of {constant.dtype}, in which torch rounds the bias: pass slopes.float()")
            return {"alibi_slopes": constant}
    raise ValueError(f"score_mod computes something else than a softcap or ALiBi: {INSTEAD}")


INSTEAD = (
    "pass functional.softcap(cap) or functional.alibi(slopes), or write cap * torch.tanh(score / cap) or "
    "score + slopes[h] * (kv_idx - q_idx); masks belong into block_mask"
)


def _traced(score_mod: Callable[..., Any], device: torch.device) -> tuple[Any, list[Any]]:
    """Return the graph of ``score_mod`` as nested tuples, with operands of a + or * sorted, and a list of its constants."""
    from torch.fx.experimental.proxy_tensor import make_fx

    score = torch.zeros(1, device=device)
    indices = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(4)]  # [1]: 0-d tensors cannot be indices
    module = make_fx(score_mod)(score, *indices)
    inputs = {node: str(i) for i, node in enumerate(x for x in module.graph.nodes if x.op == "placeholder")}

    def nested(x: Any) -> Any:
        if isinstance(x, tuple | list):
            return tuple(map(nested, x))
        if not isinstance(x, torch.fx.Node):
            return ("number", float(x)) if type(x) in (int, float) else (type(x).__name__, x)
        if x.op in ("placeholder", "get_attr"):
            return ("input", inputs[x]) if x in inputs else ("tensor", id(getattr(module, str(x.target))))
        operands = tuple(map(nested, x.args))
        operands = tuple(sorted(operands, key=repr)) if str(x.target) in COMMUTING else operands
        return (str(x.target), operands, tuple(sorted((name, nested(y)) for name, y in x.kwargs.items())))

    def constants() -> Iterator[Any]:
        for node in module.graph.nodes:
            if node.op == "get_attr":
                yield getattr(module, node.target)
            yield from (x for x in node.args if isinstance(x, float | int))

    (output,) = (node for node in module.graph.nodes if node.op == "output")
    return nested(output.args[0]), list(constants())
