"""Summary attention over a ring, as ``variants/summary.py`` of ring_attn_core explains it."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.keywords import named_keywords
from ring_attn_core.masks import full
from ring_attn_core.problem.checks import OptionalArray
from ring_attn_core.variants.summary import Summaries, SummaryInputs, SummaryOptions, SummaryPlan, plan_call

from ..block import attend_block, merge
from ..call.autograd import attention
from ..call.prepare import Arrays
from ..data.gather import AllGather
from ..ring.agreement import AgreedCall, agree_on, device_type, same_error
from ..ring.groups import Group, group_name, group_of, is_dtensor, rank_in, ranks_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@named_keywords
def summary_attention(
    q: Float[Tensor, "batch seq_local heads head_dim"],
    k: Float[Tensor, "batch seq_local kv_heads head_dim"],
    v: Float[Tensor, "batch seq_local kv_heads v_dim"],
    pool: Float[Tensor, "summaries kv_heads head_dim"] | None = None,
    *,
    block: int,
    summaries: int = 1,
    window: int,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    pooling: str = "attention",
    key_mask: Bool[Tensor, "batch seq_local"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    length: int | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Compute approximate causal attention: recent tokens exactly, and a few summaries of each earlier block.

        first(i) = block floor(max(i - window, 0) / block)      query i sees the keys first(i) <= j <= i exactly
        w_nut    = softmax over t in block n of (pool_u . k_t head_dim^-0.5)
        kbar_nu  = sum_t w_nut k_t,  vbar_nu = sum_t w_nut v_t      key and value of summary u of block n
        s_i,nu   = scale q_i . kbar_nu + log(block / summaries)     a summary counts as block / summaries tokens

    Query i also sees the summaries of all blocks before first(i). Tokens and summaries share one softmax. Every earlier token
    counts exactly once, by itself or in a summary. ``window >= length - 1`` is exact attention, and so is ``pooling="mean"`` with
    ``summaries=block``. Several language models are trained with a window and pooled blocks. Here the summaries are all-gathered.
    Under the strategy "ring", keys travel only as far as the window and one block reach.

    Arguments (arrays are this rank's shards in *contiguous* layout; positions and lengths count tokens of the global sequence):
        q, k, v: as in :func:`ring_attention`, of the same tokens.
        pool: ``[summaries, kv_heads, head_dim]``, learned, the same on every rank; zeros give the mean of the block. It is
            cast to k's dtype. Each rank's gradient of it is partial: sum it over the ranks with ``sum_gradients``.
        block: number of tokens summarized together; blocks need not end where shards do, and may be longer than shards.
        summaries: the number of summaries of a block.
        window: a query sees at least this many previous tokens exactly; the exact tokens begin at the first token of a block.
        pooling: "attention" (above), or "mean" (without ``pool``): a block is cut into ``summaries`` equal parts, and summary u
            is the mean of part u. ``block`` must then be a multiple of ``summaries``.
        key_mask: bool ``[batch, seq_local]``, True if a key may be attended. Masked keys are left out of the pooling. The
            logarithm above is then log(n / summaries), where n is the number of unmasked keys in the block. For "mean" it is
            log n, where n is the number of unmasked keys in the summary's part. A summary with n = 0 is masked. To apply this
            logarithm, each summary's values are multiplied by f, its fraction of unmasked tokens, and f is appended as one more
            column of values. The last column of the output then divides the other columns, and its logarithm is added to lse.
        group, scale, softcap, length, strategy, backend, deterministic, return_lse: as in :func:`ring_attention`. softcap
            is applied before a summary's logarithm is added.

    Returns ``out``; with ``return_lse`` (out, lse), as ring_attention does. One all-gather sends the partial summaries in float32
    (float64 for float64 inputs). If a block spans several ranks, its partial summaries are merged. Merged summaries are rounded
    to k's dtype. ``ring_attn_core.variants.summary.SummaryPlan.bytes_sent`` counts the bytes sent.

    Raise ValueError if inputs do not fit, or if shapes or options differ between ranks. Ranks compare shapes and options only at
    their first call with them, and never under torch.compile. The error is the same on every rank, and raised before anything is
    sent. Second derivatives are not supported. The call works under torch.compile(fullgraph=True).
    """
    name = group_name(group)
    sizes: dict[str, Any] = {"block": block, "window": window, "summaries": summaries, "pooling": pooling}
    score: dict[str, Any] = {"scale": scale, "softcap": softcap, "length": length}
    with same_error(name):
        options = SummaryOptions(**sizes, **score, strategy=strategy, backend=backend, deterministic=deterministic)
    out, lse = attention_with_summaries(SummaryInputs(q, k, v, pool, key_mask), options, name)
    return (out, lse) if return_lse else out


def attention_with_summaries(inputs: SummaryInputs, options: SummaryOptions, group_name: str) -> tuple[Tensor, Tensor]:
    ring = group_of(group_name)
    plan = _plan_call(inputs, options, ring)
    q, k, v, pool, key_mask = inputs
    first, end = _visible_range(q, plan, rank_in(ring))
    extents = torch.stack([first, end], -1).expand(q.shape[0], -1, 2) if plan.blocks else None
    exact, exact_lse = attention(q, k, v, Arrays(extents, key_mask), None, plan.exact_options, group_name)
    if not plan.blocks:  # pool is unused, but gets a gradient of 0, which reductions of gradients expect
        return exact if pool is None else exact + pool[:0].sum().to(exact.dtype), exact_lse
    compressed = _over_summaries(q, first, _summaries(inputs, plan, ring), plan)
    out, lse = merge((exact, exact_lse), compressed)
    return out.to(q.dtype), lse


def _visible_range(q: Tensor, plan: SummaryPlan, rank: int) -> tuple[Tensor, Tensor]:
    """Return (first, end), int32 [s]: queries see ``first .. end - 1`` exactly, earlier tokens by summaries; 0 for padding."""
    positions = torch.arange(rank * plan.local, (rank + 1) * plan.local, dtype=torch.int32, device=q.device)
    true = positions < plan.length
    return (plan.first(positions) * true, (positions + 1) * true)


def _over_summaries(q: Tensor, first: Tensor, summaries: Summaries, plan: SummaryPlan) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of this rank's queries. Each query attends to the summaries of all blocks before its ``first``."""
    options = plan.options
    end = first // options.block * options.summaries
    attend = partial(
        attend_block,
        mask=full(),
        extents=torch.stack([torch.zeros_like(end), end], -1).expand(q.shape[0], -1, 2),
        scale=options.scale,
        softcap=options.softcap,
        backend=options.backend,
    )
    k, v, fraction = summaries
    if fraction is None:
        out, lse = attend(q, k.to(q.dtype), v.to(q.dtype))
        return out, lse + math.log(options.stands_for)
    weight = fraction[..., None, None].expand(*v.shape[:3], 1)
    out, lse = attend(q, k.to(q.dtype), torch.cat([v * weight, weight], -1).to(q.dtype), key_mask=fraction > 0)
    total = out[..., -1:]
    total = torch.where(total > 0, total, 1)
    return out[..., :-1] / total, lse + total[..., 0].log() + math.log(options.stands_for)


def _summaries(inputs: SummaryInputs, plan: SummaryPlan, ring: Group) -> Summaries:
    """Return the summaries of all blocks that some query sees as summaries, merged from all ranks' partial summaries."""
    _, k, v, pool, key_mask = inputs
    (b, _, g, d), e = k.shape, v.shape[-1]
    m, slots, ranks = plan.options.summaries, plan.slots, ranks_of(ring)
    index = torch.arange(slots * m, dtype=torch.int32, device=k.device)
    first, end = plan.pooled(index // m, index % m, rank_in(ring))
    queries = k.new_zeros(m, g, d) if pool is None else pool.to(k.dtype)
    pooled = partial(
        attend_block,
        queries.repeat(slots, 1, 1).expand(b, -1, -1, -1),
        k,
        mask=full(),
        extents=torch.stack([first, end], -1).expand(b, -1, 2),
        key_mask=key_mask,
        backend=plan.options.backend,
    )
    (pooled_k, lse), (pooled_v, _) = pooled(k), pooled(v)  # two calls, because Hopper's kernels take no values wider than keys
    parts = [pooled_k, pooled_v, lse[..., None]]
    if key_mask is not None:
        before = torch.nn.functional.pad(key_mask.cumsum(1, dtype=torch.int32), (1, 0))
        parts.append((before[:, end] - before[:, first])[..., None, None].expand(b, -1, g, 1).to(lse.dtype))
    mine = torch.cat(parts, -1)
    every: Any = mine if ranks == 1 else AllGather.apply(mine, ring)
    blocks, owners = (torch.arange(n, device=k.device) for n in (plan.blocks, plan.owners))
    place, exists = plan.held(blocks[:, None], owners)
    held = every.unflatten(1, (ranks * slots, m)).index_select(1, place.flatten()).unflatten(1, (plan.blocks, plan.owners))
    exists = exists[:, :, None, None]
    pooled_k, pooled_v, lse, count = held.tensor_split([d, d + e, d + e + 1], -1)
    lse = lse.squeeze(-1).masked_fill(~exists, -math.inf)
    top = lse.amax(2, keepdim=True).detach()
    z = torch.exp(lse - top.masked_fill(top == -math.inf, 0))
    total = z.sum(2, keepdim=True)
    weight = (z / total.masked_fill(total == 0, 1))[..., None]
    whole = lambda x: (weight * x).sum(2).flatten(1, 2)
    fraction = None
    if key_mask is not None:
        fraction = (count[..., 0, 0] * exists[..., 0]).sum(2).flatten(1) / plan.options.width
    return Summaries(whole(pooled_k), whole(pooled_v), fraction)


def _plan_call(inputs: SummaryInputs, options: SummaryOptions, ring: Group) -> SummaryPlan:
    """Return the plan of the call. Raise ValueError on all ranks if an argument does not fit or differs between ranks."""
    q, k, v, pool, key_mask = inputs
    dtype = str(getattr(pool, "dtype", "")).removeprefix("torch.")
    described = None if pool is None else OptionalArray("pool", tuple(getattr(pool, "shape", ())), dtype)

    def check() -> None:
        arrays = {"q": q, "k": k, "v": v, "pool": pool, "key_mask": key_mask}
        for name, x in arrays.items():
            if x is None and name in ("pool", "key_mask"):
                continue
            if is_dtensor(x):
                raise ValueError(f"{name} is a DTensor: pass this rank's part of it, {name}.to_local()")
            if not isinstance(x, Tensor):
                raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
            if x.layout != torch.strided or x.is_nested:
                raise ValueError(f"{name} is sparse or nested: pass a dense tensor")
            if x.device != q.device:
                raise ValueError(f"{name} is on {x.device} and q on {q.device}: move it")
        plan_call({name: tuple(arrays[name].shape) for name in "qkv"}, described, options, ranks_of(ring))  # type: ignore[union-attr]

    shapes = [(f"{name}_shape", tuple(getattr(x, "shape", ()))) for name, x in zip("qkv", (q, k, v), strict=True)]
    alike = (*shapes, ("pool", described), ("key_mask", key_mask is not None), *options.compared)
    agree_on(AgreedCall("summary_attention", device_type(q), alike), ring, check)
    return SummaryPlan(options, ranks_of(ring), q.shape[1])
