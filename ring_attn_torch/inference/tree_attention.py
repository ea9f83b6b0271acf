"""Decode attention: a few new tokens attend to a cache that is sharded over the ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.kernels.decode_backend import runnable_decode
from ring_attn_core.problem.checks import INTEGERS, OptionalArray
from ring_attn_core.problem.decode import Decode, DecodeArrays, check_nodes, check_positions
from ring_attn_core.validation import in_words

from ..attend.launch import capability
from ..attend.slots import blockwise, by_kernels, end_by_kernel, merge, merge_by_kernel
from ..call.autograd import no_autocast
from ..call.prepare import dtype_name
from ..ring.agreement import AgreedCall, agree_on
from ..ring.groups import Group, is_dtensor, ranks_of, ring_of
from .merge import gather_pairs, refuse_gradients

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def tree_attention_decode(
    q: Float[Tensor, "batch queries heads head_dim"],
    k: Float[Tensor, "batch slots kv_heads head_dim"],
    v: Float[Tensor, "batch slots kv_heads v_dim"],
    *,
    q_positions: Int[Tensor, "batch queries"],
    k_positions: Int[Tensor, "batch slots"],
    group: dist.ProcessGroup | DeviceMesh | None = None,
    tree_mask: Bool[Tensor, "batch queries queries"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    alibi_slopes: Float[Tensor, " heads"] | None = None,
    k_scale: Float[Tensor, " kv_heads"] | None = None,
    v_scale: Float[Tensor, " kv_heads"] | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Any:
    """Compute exact attention of a few queries, replicated on all ranks, over a cache sharded over the ranks; for inference.

        s_ij  = scale q_i . k_j                           if 0 <= k_pos_j <= q_pos_i, and q_pos_i - k_pos_j <= window
        lse_i = log(exp(sink) + sum_j exp(s_ij))          natural log, over the slots of all ranks
        out_i = sum_j exp(s_ij - lse_i) v_j

    Each rank attends to its own slots. If there are several ranks, one all-gather then exchanges the pairs (out, lse), packed in
    one array of float32 (float64 for float64). Every rank merges the pairs in rank order, with the formula of :func:`merge` (Tree
    Attention, Shyam et al., arXiv:2408.04093). So all ranks get the same bits.

    Arguments (those not listed mean the same as in ``ring_attention``):
        q: ``[batch, queries, heads, head_dim]``, the same on every rank; bfloat16, float16, float32 or float64.
        k, v: ``[batch, slots, kv_heads, head_dim]`` and ``[..., v_dim]``, this rank's part of the cache, its tokens in any order;
            in q's dtype, or both in float8_e4m3fn. The number of slots may differ between ranks, and may be 0.
        q_positions: integers ``[batch, queries]`` below 2^31, the same on every rank; -1: a query that sees no key.
        k_positions: integers ``[batch, slots]``: the position of the token in a slot. -1: the slot is empty, and its content,
            even NaN, has no effect. The requests of a batch may differ in length.
        group: the ring; None is the default group, or a ring of one without torch.distributed.
        tree_mask: bool ``[batch, queries, queries]``, for speculative decoding: the queries are the nodes of a tree of drafted
            tokens, whose keys are in the cache already. Node j of a request has q_position and k_position ``p + j`` for a
            common p, so alternative tokens have separate slots. ``tree_mask[:, i, j]`` is True if node i sees node j: if j is
            i or an ancestor of i. Every node also sees all keys before p. The depth of a node is the number of its ancestors.
            A node's window and ALiBi bias count from position p + depth. The caller rotates the node's q and k by that position.
        window: the number of positions before its own that a query sees; None: all.
        k_scale, v_scale: float32 ``[kv_heads]``, the scales of k and v in float8_e4m3fn: the true values are ``k k_scale`` and
            ``v v_scale``.
        backend: "auto", "triton" (NVIDIA GPUs: the slots are cut into splits that fill the GPU) or "blockwise" (all devices).
        return_lse: also return lse.

    Return ``out [batch, queries, heads, v_dim]`` in q's dtype, and with ``return_lse`` also ``lse [batch, queries, heads]`` in
    float32 (float64 for float64). A query that sees no key has out 0. Its lse is -inf or, with sinks, the sink of its
    head.

    Raise ValueError before any array is sent if inputs do not fit or require a gradient, or if ranks disagree on shapes (except
    the number of slots), dtypes or options. At the first call with given shapes, dtypes and options the ranks compare them, and
    all raise the same error. In later calls a rank with an error raises alone. Values in arrays are checked on a CPU only. After
    a first call a CUDA graph may capture the call.
    """
    ring = ring_of(group)
    places = as_int32(q_positions), as_int32(k_positions)
    named = (q, k, v, *places, tree_mask, sinks, alibi_slopes, k_scale, v_scale)
    arrays = DecodeArrays(*named)
    problem: Decode | None = None
    error: Exception | None = None
    try:
        _check_tensors(arrays)
        problem = _problem(_kinds(arrays), q.device, window, scale, softcap, backend)
    except ValueError as objection:
        error = objection
    except TypeError:  # an unhashable object is neither a number nor a name
        options = ", ".join(map(in_words, (window, scale, softcap, backend)))
        error = ValueError(f"window, scale and softcap are numbers or None and backend is a name, got {options}")

    def check() -> None:
        if error is not None:
            raise error
        assert problem is not None
        _check(problem)
        refuse_gradients("tree_attention_decode", named)
        for name, x in (("q_positions", q_positions), ("k_positions", k_positions)):
            if x.device.type == "cpu" and x.dtype in (torch.int64, torch.uint32) and x.numel():
                check_positions(name, int(x.long().max()))
        if tree_mask is not None and q.device.type == "cpu":
            check_nodes(q_positions.tolist())

    agree_on(_call(problem), ring, check)
    assert problem is not None
    with no_autocast(q.device.type), torch.no_grad():
        out, lse = _attend(arrays, problem, ring)
    return (out, lse) if return_lse else out


def as_int32(positions: Any) -> Any:
    if not isinstance(positions, Tensor) or dtype_name(positions.dtype) not in set(INTEGERS) - {"int32"}:
        return positions
    return positions.long().clamp(max=torch.iinfo(torch.int32).max).to(torch.int32)


def _attend(arrays: DecodeArrays, problem: Decode, ring: Group) -> tuple[Tensor, Tensor]:
    call, ranks = _check(problem), ranks_of(ring)
    if call is None:
        out, lse = merge(gather_pairs(blockwise(arrays, problem), ring), arrays.sinks)
        return out.to(arrays.q.dtype), lse
    pairs = by_kernels(arrays, call)
    if ranks == 1:
        return end_by_kernel(pairs, arrays.sinks, call, None)
    pair = pairs[0] if call.splits == 1 else merge_by_kernel(pairs, call, None)
    return end_by_kernel(gather_pairs(pair, ring), arrays.sinks, call, ranks)


@lru_cache(maxsize=4096)
def _check(problem: Decode) -> Any:
    """Check the problem. Return the DecodeCall that launches the Triton kernels, or None if "blockwise" computes the call."""
    problem.check()
    return runnable_decode(problem)


_Kinds = tuple[tuple[str, torch.Size, torch.dtype], ...]


def _kinds(arrays: DecodeArrays) -> _Kinds:
    return tuple([(name, x.shape, x.dtype) for name, x in zip(arrays._fields, arrays, strict=True) if x is not None])


@lru_cache(maxsize=4096, typed=True)
def _problem(kinds: _Kinds, device: torch.device, window: Any, scale: Any, softcap: Any, backend: Any) -> Decode:
    shapes = [tuple(shape) for _, shape, _ in kinds]
    dtypes = [str(dtype).removeprefix("torch.") for _, _, dtype in kinds]
    others = tuple(map(OptionalArray, [name for name, _, _ in kinds[3:]], shapes[3:], dtypes[3:]))
    where: dict[str, Any] = {"device": device.type, "capability": capability(device)}
    if device.type == "cuda":
        where["multiprocessors"] = torch.cuda.get_device_properties(device).multi_processor_count
    options: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap, "backend": backend}
    q, k, v = shapes[:3]
    return Decode(q_shape=q, k_shape=k, v_shape=v, dtypes=tuple(dtypes[:3]), arrays=others, **where, **options)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _call(problem: Decode | None) -> AgreedCall:
    """Return the record by which the ranks compare this call. ``problem``: None if this rank's inputs are invalid."""
    if problem is None:
        return AgreedCall("tree_attention_decode", "cpu", ())
    return AgreedCall("tree_attention_decode", problem.device, tuple(problem.alike().items()))


def _check_tensors(arrays: DecodeArrays) -> None:
    for name, x in zip(arrays._fields, arrays, strict=True):
        if x is None and name in DecodeArrays._field_defaults:
            continue
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {in_words(x)}")
        if is_dtensor(x):
            raise ValueError(f"{name} is a DTensor: pass what this rank holds, {name}.to_local()")
        if x.layout != torch.strided or x.is_nested:
            raise ValueError(f"{name} is sparse or nested: pass a dense tensor; slots that hold nothing are at position -1")
        if x.device != arrays.q.device:
            raise ValueError(f"{name} is on {x.device} and q on {arrays.q.device}: move it")
