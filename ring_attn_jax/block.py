"""One block of attention and the exact merge of two: what a ring is made of, for whoever builds something else of it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.masks import causal
from ring_attn_core.problem.checks import FARTHEST, check_dropout_rate, check_pairs, check_runs
from ring_attn_core.runs import Band, Run, row

from .arguments import checked
from .attend.dropout import draw_of
from .attend.keys import pack
from .axes import dtype_names, vary_alike
from .op import refuse_second_derivative

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def attend_block(
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads v_dim"],
    *,
    mask: Band = causal(),
    q_run: Run | None = None,
    k_run: Run | None = None,
    extents: Int[Array, "batch queries 2"] | None = None,
    key_mask: Bool[Array, "batch keys"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: int | Int[Array, ""] | None = None,
    dropout_offset: tuple[int | Array, int | Array] = (0, 0),
    backend: str = "auto",
) -> tuple[Float[Array, "batch queries heads v_dim"], Float[Array, "batch queries heads"]]:
    """Attention of a block of queries over a block of keys, both anywhere in a longer sequence: a pair for :func:`merge`.

    ``out_i = sum_j exp(s_ij - lse_i) v_j`` and ``lse_i = log sum_j exp(s_ij)`` over the keys of the block that query i may see,
    in float32 (float64 for float64), both differentiable. A query that sees none: out 0, lse -inf.

    ``q_run``, ``k_run``: the global positions of the blocks' tokens, ``Run(start, length, stride)``, of equal stride; what a
    block holds beyond its run's length is padding. None: from 0 on, all of them. Start and length may be traced.

    The other arguments are those of ``ring_attention``, arrays those of the block. A sink is the block ``(0, sink)``: merge it in
    once.

    Raises ValueError for inputs that do not fit. No second derivative.
    """
    dtype_names(q, k, v)
    q_run, k_run = check_runs(q_run, k_run, q.shape, k.shape)
    arrays = {"extents": extents, "key_mask": key_mask, "alibi_slopes": alibi_slopes}
    check_dropout_rate(dropout_rate)
    draw = draw_of(dropout_seed, dropout_offset) if dropout_rate and dropout_seed is not None else None
    where = 1, "contiguous", mask, None, None
    _, score, backend_ = checked(q, k, v, arrays, draw, *where, scale, softcap, dropout_rate, backend, anywhere=True)
    of_q, of_k = ((0, _int32(run.length), _int32(run.start), run.stride) for run in (q_run, k_run))
    fields: Any = row(of_q, of_k, mask.clamped(FARTHEST), q.shape[1], k.shape[1])
    rows = jnp.stack([jnp.asarray(field, jnp.int32) for field in fields])[None, None]
    return _attention(*vary_alike((), q, k, v, key_mask, score, rows), backend_)


def merge(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """The (out, lse) over the keys of two pairs (out [b s h e], lse [b s h]) over disjoint keys A and B; differentiable.

    Exact, since with ``Z_A = sum_A exp(s_j) = exp(lse_A)`` and ``Z = Z_A + Z_B``

        lse = log(Z_A + Z_B) = log(exp(lse_A) + exp(lse_B))
        out = sum_(A and B) exp(s_j) v_j / Z = (Z_A out_A + Z_B out_B) / Z
            = exp(lse_A - lse) out_A + exp(lse_B - lse) out_B

    A side that saw nothing, out 0 and lse -inf, changes nothing. Raises ValueError for what are no such pairs.
    """
    check_pairs(a, b, lambda x: hasattr(x, "shape") and hasattr(x, "dtype"), "an array")
    (out_a, lse_a), (out_b, lse_b) = a, b
    top = lax.stop_gradient(jnp.maximum(lse_a, lse_b))
    top = jnp.where(top == -jnp.inf, 0, top)
    z_a, z_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    z = z_a + z_b
    nothing = z == 0
    z = jnp.where(nothing, 1, z)
    out = (z_a / z)[..., None] * out_a + (z_b / z)[..., None] * out_b
    return out, jnp.where(nothing, -jnp.inf, top + jnp.log(z))


def _int32(x: Any) -> Any:
    """A traced number in the dtype of rows; an int as it is."""
    return x if isinstance(x, int) else jnp.asarray(x, jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attention(q, k, v, key_mask, score, rows, backend):  # type: ignore[no-untyped-def]
    return backend.attend(q, pack(k, v, key_mask, backend.apart), rows, score, None, last=False)


def _forward(q, k, v, key_mask, score, rows, backend):  # type: ignore[no-untyped-def]
    out, lse = _attention(q, k, v, key_mask, score, rows, backend)
    return (out, lse), (q, k, v, key_mask, score, rows, out, lse)


def _backward(backend, residuals, cotangents):  # type: ignore[no-untyped-def]
    return *_gradients(*residuals, *cotangents, backend), None, None, None


@partial(jax.custom_vjp, nondiff_argnums=(10,))
def _gradients(q, k, v, key_mask, score, rows, out, lse, dout, dlse, backend):  # type: ignore[no-untyped-def]
    keys = pack(k, v, key_mask, backend.apart)
    of_q = backend.cotangents(q, keys, rows, score, (out, lse), (dout, dlse))
    dq, dkv = backend.attend_backward(of_q, keys, rows, score, None, lambda: None, last=True)
    dk, dv = dkv if isinstance(dkv, tuple) else jnp.split(dkv, [k.shape[-1]], -1)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


_attention.defvjp(_forward, _backward)
_gradients.defvjp(lambda *arguments: (_gradients(*arguments), None), refuse_second_derivative)
