"""The ring as a ``jax.custom_vjp`` function."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from ..attend.backend import Backend
from ..attend.keys import Keys, pack
from ..attend.score import Score
from ..attend.state import State
from ..axes import Trees, on_auto_axes, sharded_like
from ..ring import loop
from ..ring.step import Ring

OUT_NAME = "ring_attn_out"
LSE_NAME = "ring_attn_lse"


class OpInputs(NamedTuple):
    """The inputs of an attention call; ``score`` holds the scale, the extents, the sinks and the like.

    Shapes: q [b s h d], k [b t g d], v [b t g e], key_mask bool [b t] or None, key_extents int [b t 2] or None.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    key_mask: jax.Array | None
    key_extents: jax.Array | None
    score: Score

    @property
    def gradients(self) -> OpInputs:
        """A copy with None for each array: the tree that a custom_vjp returns, in which None is a gradient of zero."""
        return OpInputs(*(None,) * 5, replace(self.score, extents=None, sinks=None, alibi_slopes=None, dropout_seed=None))  # type: ignore[arg-type]


def attention_of(inputs: OpInputs, ring: Ring, backend: Backend) -> State:
    """Return out and lse of this rank's queries, differentiable once, in reverse mode."""
    (inputs,) = reverse_only(inputs)
    return _attention(inputs, ring, backend)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _attention(inputs: OpInputs, ring: Ring, backend: Backend) -> State:
    return round_the_ring(inputs, ring, backend)


def round_the_ring(inputs: OpInputs, ring: Ring, backend: Backend, total: State | None = None) -> State:
    """Return out and lse of this rank's queries, without a derivative; the loop continues from ``total``."""

    def forward(inputs: OpInputs, total: State | None) -> State:
        return loop.forward(inputs.q, _keys(inputs, ring, backend), inputs.score, ring, backend, total)

    rows, of_v = sharded_like(inputs.q)[:3], sharded_like(inputs.v)
    return on_auto_axes(forward, (PartitionSpec(*rows, of_v[3]), PartitionSpec(*rows)))(inputs, total)


def _keys(inputs: OpInputs, ring: Ring, backend: Backend) -> Keys:
    return pack(inputs.k, inputs.v, inputs.key_mask, inputs.key_extents, apart=backend.apart and not ring.plan.hops)


def _forward(inputs: OpInputs, ring: Ring, backend: Backend) -> tuple[State, tuple[OpInputs, State]]:
    out, lse = round_the_ring(inputs, ring, backend)
    total = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return total, (inputs, total)


def _backward(ring: Ring, backend: Backend, residuals: tuple[OpInputs, State], dtotal: State) -> tuple[OpInputs]:
    inputs, total = residuals
    dq, dk, dv, dsinks = _gradients(*reverse_only(inputs, total, dtotal), ring, backend)
    nothing = inputs.gradients
    return (nothing._replace(q=dq, k=dk, v=dv, score=replace(nothing.score, sinks=dsinks)),)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _gradients(inputs: OpInputs, total: State, dtotal: State, ring: Ring, backend: Backend) -> Any:
    def backward(inputs: OpInputs, total: State, dtotal: State) -> Any:
        dq, dkv, dsinks = loop.backward(inputs.q, _keys(inputs, ring, backend), total, dtotal, inputs.score, ring, backend)
        dk, dv = dkv if isinstance(dkv, tuple) else jnp.split(dkv, [inputs.k.shape[-1]], -1)
        dsinks = None if dsinks is None else dsinks.astype(inputs.score.sinks.dtype)  # type: ignore[union-attr]
        return dq.astype(inputs.q.dtype), dk.astype(inputs.k.dtype), dv.astype(inputs.v.dtype), dsinks

    q, k, v, *_, score = inputs
    specs = *map(sharded_like, (q, k, v)), None if score.sinks is None else sharded_like(score.sinks)
    return on_auto_axes(backward, specs)(inputs, total, dtotal)


def refuse_forward_mode(*_: Any) -> Any:
    raise NotImplementedError(
        "ring_attention has no forward-mode derivative, so neither jax.jvp, jacfwd, linearize nor hessian goes through it: use "
        "jax.grad or jax.vjp, once. A product with a Hessian is a difference of two gradients, "
        "(grad(x + h v) - grad(x - h v)) / (2 h)"
    )


_tangent = Primitive("ring_attn_tangent")
"""The identity of a tangent: reverse mode transposes it, and evaluating it, which forward mode would do, raises.

Without it JAX says that jvp cannot be applied to a custom_vjp function, which names neither ring_attention nor what to do.
"""
_tangent.def_impl(refuse_forward_mode)
_tangent.def_abstract_eval(lambda x: x)
mlir.register_lowering(_tangent, refuse_forward_mode)
ad.deflinear2(_tangent, lambda cotangent, _: [cotangent])
batching.primitive_batchers[_tangent] = lambda args, dims: (_tangent.bind(*args), dims[0])


@jax.custom_jvp
def _reverse_only(x: jax.Array) -> jax.Array:
    return x


_reverse_only.defjvp(lambda primals, tangents: (_reverse_only(primals[0]), _tangent.bind(tangents[0])))


def reverse_only(*trees: *Trees) -> tuple[*Trees]:
    """Return the arrays, tied to an identity whose forward-mode derivative raises NotImplementedError in words."""
    return jax.tree.map(lambda x: _reverse_only(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, trees)


def refuse_second_derivative(*_: Any) -> Any:
    raise RuntimeError("ring_attention has no second derivative: differentiate it once, without a grad of a grad")


_attention.defvjp(_forward, _backward)
_gradients.defvjp(lambda *arguments: (_gradients(*arguments), None), refuse_second_derivative)
