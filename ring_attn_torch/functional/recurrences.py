"""Recurrences and convolutions under the names and signatures of flash-linear-attention, mamba_ssm and causal_conv1d, on a ring.

Arrays are this rank's shards, and ``cu_seqlens`` and ``seq_idx`` of the whole row, in natural order, the same on every rank. Then
come ``group``, ``layout`` and ``length``, as in :func:`causal_conv`. Arguments of a kept state, and others that are not in a
signature, raise a ValueError that names them, unless they are None or False.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..data.extents import document_extents
from ..data.layout import to_layout
from ..recurrence.convolution import causal_conv
from ..recurrence.delta_rule import gated_delta_rule
from ..recurrence.runs import Layout, Ring
from ..recurrence.state_space import state_space
from ..ring.agreement import same_error
from ..ring.groups import rank_in, ranks_of, ring_of
from ..ring.halo import wide

NO_LIMIT = (0.0, float("inf"))


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    activation: str | None = None,
    group: Ring = None,
    layout: Layout = "zigzag",
    length: int | None = None,
    **others: object,
) -> Tensor:
    """Compute ``causal_conv1d.causal_conv1d_fn`` over a ring: x ``[batch, channels, s]``, weight ``[channels, taps]``.

    ``seq_idx``: int ``[batch, tokens]``, the document of each token of the whole rows. Raise ValueError as :func:`causal_conv`
    does, and for ``initial_states``, ``return_final_states`` and ``final_states_out``: states begin with their document.
    """
    arrays = lambda: (x.transpose(1, 2),)
    (rows,), where = _on_ring("causal_conv1d_fn", arrays, (group, layout, length), {"ids": seq_idx}, others)
    return causal_conv(rows, weight, bias, activation=activation, **where).to(x.dtype).transpose(1, 2)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    group: Ring = None,
    layout: Layout = "zigzag",
    length: int | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Compute ``fla.ops.gated_delta_rule.chunk_gated_delta_rule`` over a ring; the second result, a last state, is None.

    Shapes are those of :func:`gated_delta_rule`. ``cu_seqlens``: int ``[documents + 1]``, of the whole row. Raise ValueError as
    :func:`gated_delta_rule` does, and for ``initial_state``, ``output_final_state``, ``cp_context``, gates inside the kernel
    (``use_gate_in_kernel``, ``use_beta_sigmoid_in_kernel``) and other arguments.
    """
    others = {name: x for name, x in others.items() if name not in ("cu_seqlens_cpu", "chunk_indices", "chunk_size")}
    arrays = lambda: (q, k, v, g, beta)
    held, where = _on_ring("chunk_gated_delta_rule", arrays, (group, layout, length), {"cu_seqlens": cu_seqlens}, others)
    return gated_delta_rule(*held, scale=scale, normalize=use_qk_l2norm_in_kernel, **where), None


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    group: Ring = None,
    layout: Layout = "zigzag",
    length: int | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Compute ``fla.ops.kda.chunk_kda`` over a ring: :func:`chunk_gated_delta_rule`, with g ``[batch, s, heads, K]``."""
    others = {name: x for name, x in others.items() if name not in ("cu_seqlens_cpu", "disable_recompute")}

    def arrays() -> tuple[Tensor, ...]:
        if g.ndim != 4:
            raise ValueError(f"functional.chunk_kda takes g [batch, s, heads, K], got {g.ndim} axes: use chunk_gated_delta_rule")
        return q, k, v, g, beta

    held, where = _on_ring("chunk_kda", arrays, (group, layout, length), {"cu_seqlens": cu_seqlens}, others)
    return gated_delta_rule(*held, scale=scale, normalize=use_qk_l2norm_in_kernel, **where), None


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    group: Ring = None,
    layout: Layout = "zigzag",
    length: int | None = None,
    **others: object,
) -> Tensor:
    """Compute ``mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined`` over a ring; ``chunk_size`` changes no result.

    Shapes are those of :func:`state_space`. ``seq_idx``: documents, as in :func:`causal_conv1d_fn`. Raise ValueError as
    :func:`state_space` does, and for ``initial_states``, ``return_final_states``, ``return_varlen_states``, ``cu_seqlens``, which
    serves only that, and other arguments.
    """
    arrays = lambda: (_like(x, z), step_sizes(dt, dt_bias, dt_softplus).clamp(*dt_limit))
    (x, dt), where = _on_ring("mamba_chunk_scan_combined", arrays, (group, layout, length), {"ids": seq_idx}, others)
    return _gate(state_space(x, dt, A, B, C, D=D, **where), z)


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    group: Ring = None,
    layout: Layout = "zigzag",
    length: int | None = None,
    **others: object,
) -> Tensor:
    """Compute ``mamba_ssm.ops.selective_scan_interface.selective_scan_fn`` over a ring.

    u, delta and z are ``[batch, channels, s]``, A is ``[channels, N]``, B and C are ``[batch, N, s]``. Raise ValueError as
    :func:`state_space` does, and for ``return_last_state`` and other arguments.
    """

    def arrays() -> tuple[Tensor, ...]:
        x, dt, *rest = (each.transpose(1, 2) for each in (_like(u, z), delta, B, C))
        return x, step_sizes(dt, delta_bias, delta_softplus), *rest

    (x, dt, *rest), where = _on_ring("selective_scan_fn", arrays, (group, layout, length), {}, others)
    return _gate(state_space(x, dt, A, *rest, D=D, **where).transpose(1, 2), z)


def _like(x: Tensor, z: Tensor | None) -> Tensor:
    """Return ``x``; raise ValueError if the gate ``z`` has another shape."""
    if z is not None and z.shape != x.shape:
        raise ValueError(f"the gate z must have the shape {list(x.shape)} of the input, got {list(z.shape)}")
    return x


def _gate(out: Tensor, z: Tensor | None) -> Tensor:
    return out if z is None else (wide(out) * F.silu(wide(z))).to(out.dtype)


def step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Return dt plus its bias, after softplus if asked, in at least float32."""
    dt = wide(dt) if bias is None else wide(dt) + wide(bias)
    return F.softplus(dt) if softplus else dt


def _on_ring(
    name: str,
    prepare: Callable[[], tuple[Tensor, ...]],
    where: tuple[Ring, Layout, int | None],
    documents: dict[str, Any],
    others: dict[str, object],
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the arrays of ``prepare`` and the ring's arguments. All ranks raise if one fails or one of ``others`` is set."""
    group, layout, length = where
    ring, given = ring_of(group), {key: x for key, x in documents.items() if x is not None}
    ranks = ranks_of(ring)
    layout = layout if ranks > 1 else "contiguous"  # one rank has one run
    with same_error(ring):
        for key, x in others.items():
            if x is not None and x is not False:
                raise ValueError(
                    f"functional.{name} got {key}, which it does not have over a ring: each document begins from the state 0, "
                    "and no state is returned; compute gates before the call, and leave this argument out"
                )
        arrays, extents = prepare(), None
        local = arrays[0].shape[1]
        if given:
            total = ranks * local if length is None else length
            if "ids" in given and given["ids"].shape[1] != total:
                raise ValueError(
                    f"functional.{name}: seq_idx must have the {total} tokens of the row, got {given['ids'].shape[1]}"
                )
            extents = document_extents(**given, **({} if "ids" in given else {"length": total}))  # type: ignore
            extents = F.pad(extents, (0, 0, 0, ranks * local - total))
            extents = to_layout(extents, layout, ranks).chunk(ranks, 1)[rank_in(ring)]
    return arrays, {"group": group, "layout": layout, "length": length, "extents": extents}
