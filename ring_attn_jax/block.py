"""Attention of one block, and the exact merge of blocks: the building blocks of a ring, for use in other algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.keywords import named_keywords
from ring_attn_core.masks import causal
from ring_attn_core.problem.checks import FARTHEST, check_pairs, check_runs, check_v_dim, rate_of
from ring_attn_core.problem.options import Options
from ring_attn_core.runs import Band, Run, row

from .attend.dropout import dropout_state
from .attend.one_run import impossible, positions_of
from .attend.state import State
from .axes import dtype_names, on_auto_axes, sharded_like, vary_alike
from .call.autograd import OpInputs, decide_forward, refuse_second_derivative, reverse_only, sharded_state
from .call.decide import Decision, compile_call
from .call.prepare import Arrays, problem_of

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@named_keywords
def attend_block(
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads v_dim"] | None = None,
    *,
    v_dim: int | None = None,
    mask: Band = causal(),
    q_run: Run | None = None,
    k_run: Run | None = None,
    extents: Int[Array, "batch queries 2"] | None = None,
    key_extents: Int[Array, "batch keys 2"] | None = None,
    key_mask: Bool[Array, "batch keys"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    dropout_rate: float | None = None,
    dropout_seed: int | Int[Array, ""] | None = None,
    dropout_offset: tuple[int | Array, int | Array] = (0, 0),
    backend: str = "auto",
) -> tuple[Float[Array, "batch queries heads v_dim"], Float[Array, "batch queries heads"]]:
    """Compute attention of a block of queries over a block of keys, both anywhere in a longer sequence.

    Return (out, lse) with ``out_i = sum_j exp(s_ij - lse_i) v_j`` and ``lse_i = log sum_j exp(s_ij)``. Here s_ij is the score of
    query i and key j, and j runs over the keys of the block that query i may see. Both results are float32 (float64 for float64
    inputs) and differentiable. A query that sees no key has out 0 and lse -inf. :func:`merge` merges the pairs of several blocks.

    ``q_run``, ``k_run``: the global positions of the query tokens and of the key tokens, each a ``Run(start, length, stride)``.
    The strides must be equal. Tokens of the block beyond a run's length are padding. None: all tokens of the block, from position
    0 on. ``start`` and ``length`` may be traced.

    The other arguments are those of ``ring_attention``, with arrays of the block's tokens. To apply a sink, merge the pair (out
    0, lse ``sink``) into the merged result once, not once per block.

    Raise ValueError if inputs do not fit. Differentiable once, in reverse mode.
    """
    rate = rate_of(dropout_rate, dropout_seed)
    v_dim = check_v_dim(v_dim, getattr(k, "shape", ()), None if v is None else getattr(v, "shape", ()))
    numbers: dict[str, Any] = {"scale": scale, "softcap": softcap, "dropout_rate": rate, "v_dim": v_dim}
    options = Options(layout="contiguous", mask=mask, backend=backend, **numbers)
    dtype_names(q, k, k if v is None else v)
    v = k[..., :v_dim] if v is None else v
    q_run, k_run = check_runs(q_run, k_run, q.shape, k.shape)
    state = dropout_state(dropout_seed, dropout_offset) if rate and dropout_seed is not None else None
    arrays = Arrays(extents, key_mask, None, alibi_slopes, state, key_extents)
    out, lse, _ = block_state(q, k, v, arrays, options, (q_run, k_run))
    return out, lse


def block_state(q: Any, k: Any, v: Any, arrays: Arrays, options: Options, runs: tuple[Run, Run]) -> State:
    decision = compile_call(problem_of(q, k, v, arrays, 1, options), any_position=True, ahead=True)
    q_row, k_row = ((0, _int32(run.length), _int32(run.start), run.stride) for run in runs)
    fields: Any = row(q_row, k_row, options.mask.clamped(FARTHEST), q.shape[1], k.shape[1])
    rows = jnp.stack([jnp.asarray(field, jnp.int32) for field in fields])[None, None]
    inputs, rows = vary_alike((), OpInputs.of(q, k, v, arrays), rows)
    (inputs,) = reverse_only(inputs)
    return _attention(inputs, rows, decision)


def merge(a: tuple[Array, Array] | Sequence[tuple[Array, Array]], b: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
    """Merge two pairs (out [b s h e], lse [b s h]) over disjoint key sets A and B into the pair over all keys.

    ``merge([a, b, c])`` merges a list of pairs in order. The results are differentiable.

    The merge is exact, since with ``Z_A = sum_A exp(s_j) = exp(lse_A)`` and ``Z = Z_A + Z_B``

        lse = log(Z_A + Z_B) = log(exp(lse_A) + exp(lse_B))
        out = sum_(A and B) exp(s_j) v_j / Z = (Z_A out_A + Z_B out_B) / Z
            = exp(lse_A - lse) out_A + exp(lse_B - lse) out_B

    A query that sees no key of A, with out 0 and lse -inf, keeps its pair over B. A float32 lse has a rounding error of up to
    ``2^-24 |lse|``. This error alone changes out by up to ``2^-24 |lse| |out_A - out_B|``. If lse is 1e4, this bound is
    ``6e-4 |out_A - out_B|``. The merge adds its own rounding. For float32 and float64 inputs, :func:`ring_attention` carries the
    rounding error of lse from step to step. Raise ValueError if an argument is not a pair (out, lse), or if the shapes do not
    fit.
    """
    pairs = check_pairs(a, b, lambda x: hasattr(x, "shape") and hasattr(x, "dtype"), "an array")
    top = lax.stop_gradient(reduce(jnp.maximum, [lse for _, lse in pairs]))
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = [jnp.exp(lse - top) for _, lse in pairs]
    z = reduce(jnp.add, weights)
    nothing = z == 0
    z = jnp.where(nothing, 1, z)
    out = reduce(jnp.add, [(weight / z)[..., None] * out for weight, (out, _) in zip(weights, pairs, strict=True)])
    return out, jnp.where(nothing, -jnp.inf, top + jnp.log(z))


def _int32(x: Any) -> Any:
    """Return ``x`` unchanged if it is an int, else as an int32 array, the dtype of a ``Row``'s fields."""
    return x if isinstance(x, int) else jnp.asarray(x, jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attention(inputs: OpInputs, rows: jax.Array, decision: Decision) -> State:
    def forward(inputs: OpInputs, rows: jax.Array) -> State:
        q, k, v, arrays = inputs
        state = decision.backend.attend(q, decision.pack_keys(k, v, arrays), rows, decision.score_with(arrays), None, last=False)
        if arrays.extents is None:
            return state
        return state.nan_at(impossible(arrays.extents, positions_of(rows[:, 0, 2:5], q.shape[1])))

    return on_auto_axes(forward, sharded_state(inputs))(inputs, rows)


def _forward(inputs: OpInputs, rows: jax.Array, decision: Decision) -> tuple[State, tuple[OpInputs, jax.Array, State]]:
    total = _attention(inputs, rows, decide_forward(decision))
    return total, (inputs, rows, total)


def _backward(decision: Decision, residuals: tuple[OpInputs, jax.Array, State], dtotal: State) -> tuple[OpInputs, None]:
    inputs, rows, total = residuals
    inputs, total, dtotal = reverse_only(inputs, total, dtotal._replace(rest=None))
    return _gradients(inputs, rows, total, dtotal, decision.backward), None


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _gradients(inputs: OpInputs, rows: jax.Array, total: State, dtotal: State, decision: Decision) -> OpInputs:
    def backward(inputs: OpInputs, rows: jax.Array, total: State, dtotal: State) -> OpInputs:
        (q, k, v, arrays), backend = inputs, decision.backend
        keys, score = decision.pack_keys(k, v, arrays), decision.score_with(arrays)
        query = backend.backward_inputs(q, keys, rows, score, total, dtotal)
        dq, dkv = backend.attend_backward(query, keys, rows, score, None, lambda: None, last=True)
        dk, dv = dkv if isinstance(dkv, tuple) else jnp.split(dkv, [k.shape[-1]], -1)
        return OpInputs(dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), Arrays())

    specs: Any = (*map(sharded_like, inputs[:3]), Arrays())
    return on_auto_axes(backward, OpInputs(*specs))(inputs, rows, total, dtotal)


_attention.defvjp(_forward, _backward)
_gradients.defvjp(lambda *arguments: (_gradients(*arguments), None), refuse_second_derivative)
