"""``torch.nn.attention.flex_attention.flex_attention`` over a ring; softcap and ALiBi are score_mods recognised by tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.masks import full
from ring_attn_core.validation import in_words

from .block_masks import block_mask_arguments
from .scaled_dot_product import tokens_first
from .shards import Arguments, Qkv, RingArguments, attend, shards_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch.nn.attention.flex_attention import BlockMask

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of (score, batch row, head, q_pos, k_pos) that returns the new score."""

COMMUTING = ("aten.add.Tensor", "aten.mul.Tensor")

INSTEAD = (
    "pass functional.softcap(cap) or functional.alibi(slopes), or write cap * torch.tanh(score / cap) or "
    "score + slopes[h] * (kv_idx - q_idx); masks belong into block_mask"
)


def flex_attention(
    query: Float[Tensor, "batch heads seq_local head_dim"],
    key: Float[Tensor, "batch kv_heads kv_local head_dim"],
    value: Float[Tensor, "batch kv_heads kv_local v_dim"],
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str = "zigzag",
    length: int | None = None,
    kv_length: int | None = None,
) -> Any:
    """Compute ``torch.nn.attention.flex_attention.flex_attention`` over a ring, with gradients.

    query, key, value: this rank's shards, ``[batch, heads, tokens, head_dim]``. Return out, or (out, lse [batch, heads, tokens])
    with ``return_lse``, or (out, AuxOutput) with ``return_aux=AuxRequest(lse=True)``.

    ``block_mask``: a BlockMask of the global sequence in natural order, made by ``create_block_mask(mask_mod, B, H, length,
    kv_length)``, the same on every rank. Its mask_mod is evaluated at every pair of tokens, once: the result is cached until the
    BlockMask dies or a tensor or number that the mask_mod reads changes. A mask_mod that reads other objects is evaluated at each
    call. The masks that a ring computes: :mod:`ring_attn_torch.functional`.

    ``score_mod``: ``functional.softcap(cap)``, ``functional.alibi(slopes)``, or a function that torch traces to the same graph.
    ``scale``, ``enable_gqa``: as in torch. ``group``, ``layout`` (a name), ``length``, ``kv_length``: as in ring_attention.

    Raise ValueError, the same on every rank and before anything is sent, if score_mod or the mask is of another kind, if
    ``kernel_options`` are passed, or if ring_attention refuses an argument. Also raise it if a block_mask has more than 32,768
    queries or keys, or lists blocks that contradict its mask_mod, if torch.compile traces a score_mod or a block_mask, or if
    ``return_aux`` asks for max_scores or is passed together with ``return_lse``.
    """
    ring = RingArguments(group, layout, length, kv_length)

    def prepare() -> tuple[Qkv, Arguments]:
        if kernel_options is not None:
            raise ValueError("kernel_options tune torch's own kernels: leave them out, ring attention chooses its tiles itself")
        if return_aux is not None and not isinstance(getattr(return_aux, "lse", None), bool):
            raise ValueError(f"return_aux must be an AuxRequest, got {in_words(return_aux)}: pass AuxRequest(lse=True)")
        if return_aux is not None and return_lse:
            raise ValueError("return_lse beside return_aux is an error in torch too: pass return_aux=AuxRequest(lse=True) alone")
        if getattr(return_aux, "max_scores", False):
            raise ValueError("return_aux asks for max_scores, which ring attention does not return: pass AuxRequest(lse=True)")
        q, k, v = tokens_first(query, key, value, enable_gqa)
        shards = shards_of(q, k, ring)
        mask: Arguments = {"mask": full()}
        if block_mask is not None:
            parts = block_mask_arguments(block_mask, (q.shape[0], q.shape[2], *shards.lengths))
            mask = shards.mask(parts, q.shape[0], q.device)
        score = {"scale": scale, **_arguments_of(score_mod, q.device)}
        return (q, k, v), {**shards.arguments, **mask, **score, "return_lse": True}

    out, lse = (x.transpose(1, 2) for x in attend(prepare, ring))
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


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


def _arguments_of(score_mod: Any, device: torch.device) -> Arguments:
    """Convert a score_mod: compare its graph with ``softcap(c)`` and ``alibi(c)`` for each constant c in it."""
    if score_mod is None:
        return {}
    if not callable(score_mod):
        raise ValueError(f"score_mod must be a function of (score, b, h, q_idx, kv_idx), got {in_words(score_mod)}")
    if torch.compiler.is_compiling():
        raise ValueError("score_mod is read by tracing it, which torch.compile cannot: call ring_attention with softcap=")
    try:
        graph, constants = _trace(score_mod, device)
    except Exception as error:
        raise ValueError(f"score_mod cannot be traced, {error}: {INSTEAD}") from error
    for constant in constants:
        if isinstance(constant, float | int) and graph == _trace(softcap(constant), device)[0]:
            return {"softcap": float(constant)}
        if isinstance(constant, Tensor) and constant.ndim == 1 and graph == _trace(alibi(constant), device)[0]:
            if constant.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"score_mod has slopes of {constant.dtype}, in which torch rounds the bias: pass slopes.float()")
            return {"alibi_slopes": constant}
    raise ValueError(f"score_mod computes something else than a softcap or ALiBi: {INSTEAD}")


def _trace(score_mod: Callable[..., Any], device: torch.device) -> tuple[Any, list[Any]]:
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
