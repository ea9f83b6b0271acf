"""The ring as a ``jax.custom_vjp`` function."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from ring_attn_core.problem.options import Options

from ..attend.one_run import impossible, positions_of
from ..attend.state import State, carries_rest
from ..axes import Trees, on_auto_axes, ring_size, sharded_like, vary_alike
from ..ring import loop
from ..ring.strategies.needed import unavailable
from ..ring.strategies.ring import rows
from .decide import Decision, decide
from .prepare import Arrays, problem_of

OUT_NAME = "ring_attn_out"
LSE_NAME = "ring_attn_lse"
"""The checkpoint names of out and of lse. LSE_NAME also names lse's rounding error (``State.rest``), which is saved with lse."""


class OpInputs(NamedTuple):
    """The arrays q [b s h d], k [b t g d], v [b t g e] and others of a call, or their gradients."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    arrays: Arrays

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, v: jax.Array, arrays: Arrays) -> OpInputs:
        """Build the record. Stop the gradient of the ALiBi slopes, and leave out dropout if q is empty."""
        if arrays.alibi_slopes is not None:
            arrays = arrays._replace(alibi_slopes=lax.stop_gradient(arrays.alibi_slopes))
        if not q.size:  # XLA fails on dropout in a shard_map of empty arrays
            arrays = arrays._replace(dropout_seed=None)
        return cls(q, k, v, arrays)


def attention(q: Any, k: Any, v: Any, arrays: Arrays, options: Options, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """Compute (out, lse) of ``ring_attention`` from its arguments as records. Differentiable once, in reverse mode.

    If ``v`` is None, the values are the first ``options.v_dim`` columns of k.
    """
    v = k[..., : options.v_dim] if v is None else v
    ranks = ring_size(axis_name)
    decision = decide(problem_of(q, k, v, arrays, ranks, options.in_ring(ranks)))
    (inputs,) = reverse_only(*vary_alike((axis_name,), OpInputs.of(q, k, v, arrays)))
    return _attention(inputs, decision, axis_name)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _attention(inputs: OpInputs, decision: Decision, axis_name: str) -> tuple[jax.Array, jax.Array]:
    out, lse, _ = round_the_ring(inputs, decision, axis_name)
    return out, lse


def round_the_ring(inputs: OpInputs, decision: Decision, axis_name: str, total: State | None = None) -> State:
    """Run the ring's forward from ``total``, a state over other keys or None, and return the state of this rank's queries."""

    def forward(inputs: OpInputs, total: State | None) -> State:
        q, k, v, arrays = inputs
        keys, score = decision.pack_keys(k, v, arrays), decision.score_with(arrays)
        ring = decision.ring(axis_name)
        total = loop.forward(q, keys, score, ring, decision.backend, total)
        if arrays.extents is None:
            return total
        at = positions_of(rows(ring._replace(plan=decision.problem.plan), 0)[:, 0, 2:5], q.shape[1])
        total = total.nan_at(impossible(arrays.extents, at))
        return total.nan_at(unavailable(arrays.extents, ring))

    return on_auto_axes(forward, sharded_state(inputs))(inputs, total)


def decide_forward(decision: Decision) -> Decision:
    """Return the decision on a forward that a backward follows: a backend named by the user reads v as an array in both."""
    return decision if decision.problem.options.backend == "auto" else decision.backward


def sharded_state(inputs: OpInputs) -> Any:
    """Return the PartitionSpecs of out, lse and rest over the mesh axes of Explicit type, as a ``State``."""
    rows, v_specs = PartitionSpec(*sharded_like(inputs.q)[:3]), sharded_like(inputs.v)
    return State(PartitionSpec(*rows, v_specs[3]), rows, rows if carries_rest(inputs.q.dtype) else None)  # type: ignore[arg-type]


def _forward(inputs: OpInputs, decision: Decision, axis_name: str) -> tuple[tuple[jax.Array, jax.Array], tuple[OpInputs, State]]:
    out, lse, rest = round_the_ring(inputs, decide_forward(decision), axis_name)
    total = State(checkpoint_name(out, OUT_NAME), *checkpoint_name((lse, rest), LSE_NAME))
    return total[:2], (inputs, total)


def _backward(decision: Decision, axis_name: str, residuals: tuple[OpInputs, State], dtotal: Any) -> tuple[OpInputs]:
    return (_gradients(*reverse_only(*residuals, State(*dtotal)), decision.backward, axis_name),)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _gradients(inputs: OpInputs, total: State, dtotal: State, decision: Decision, axis_name: str) -> OpInputs:
    """Return the gradients of the inputs as ``OpInputs``. Arrays without a gradient get None, which custom_vjp accepts."""

    def backward(inputs: OpInputs, total: State, dtotal: State) -> Any:
        q, k, v, arrays = inputs
        keys, score, ring = decision.pack_keys(k, v, arrays), decision.score_with(arrays), decision.ring(axis_name)
        dq, dkv, dsinks = loop.backward(q, keys, total, dtotal, score, ring, decision.backend)
        dk, dv = dkv if isinstance(dkv, tuple) else jnp.split(dkv, [k.shape[-1]], -1)
        dsinks = None if dsinks is None or arrays.sinks is None else dsinks.astype(arrays.sinks.dtype)
        return OpInputs(dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), Arrays(sinks=dsinks))

    sink_specs: Any = None if inputs.arrays.sinks is None else sharded_like(inputs.arrays.sinks)
    specs: Any = (*map(sharded_like, inputs[:3]), Arrays(sinks=sink_specs))
    return on_auto_axes(backward, OpInputs(*specs))(inputs, total, dtotal)


def refuse_forward_mode(*_: Any) -> Any:
    raise NotImplementedError(
        "ring_attention has no forward-mode derivative, so neither jax.jvp, jacfwd, linearize nor hessian goes through it: use "
        "jax.grad or jax.vjp, once. A product with a Hessian is a difference of two gradients, "
        "(grad(x + h v) - grad(x - h v)) / (2 h)"
    )


_tangent = Primitive("ring_attn_tangent")
"""An identity function of tangents that raises if forward mode evaluates it. Reverse mode only transposes it.

Without it JAX raises its own error, about jvp of a custom_vjp function, which does not name ring_attention.
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
    """Return the arrays unchanged, but raise NotImplementedError, with an explanation, on forward-mode differentiation."""
    return jax.tree.map(lambda x: _reverse_only(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, trees)


def refuse_second_derivative(*_: Any) -> Any:
    raise RuntimeError("ring_attention has no second derivative: differentiate it once, without a grad of a grad")


_attention.defvjp(_forward, _backward)
_gradients.defvjp(lambda *arguments: (_gradients(*arguments), None), refuse_second_derivative)
