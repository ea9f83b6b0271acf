"""The ring under autograd: an eager autograd.Function, or an op of torch.library under torch.compile, modes and transforms.

An eager call skips the op's dispatch and the encoding of its options as text. ``eager_only`` tests if a call may be eager. The
op and the Function ``Eager`` both call ``forward`` and ``backward`` of this file. The backward of ``Eager`` calls the op for the
backward instead, if ``eager_only`` returns False at that time, or under create_graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from ring_attn_core.problem.options import Options

from ..attend.dropout import Dropout, dropout_state
from ..attend.state import Gradients, State, carries_rest
from ..ring import loop
from ..ring.agreement import refuse
from ..ring.groups import group_of, ranks_of
from .decide import decide, decide_backward
from .prepare import Arrays, check_tensors, problem_of, refuse_transforms

P = ParamSpec("P")
T = TypeVar("T")
PLAIN = Tensor, torch.nn.Parameter


class OpCall(NamedTuple):
    """The non-tensor arguments of an op, whose schema has no record type. ``group``: the ring's name, "" for a single rank."""

    options: Options
    group: str = ""

    @property
    def text(self) -> str:
        """Return the group and the options as text. ``options.counts`` are left out: the op takes them as integers."""
        return f"{self.group};{self.options.text}"

    @staticmethod
    @lru_cache(maxsize=4096)
    def read(text: str, counts: tuple[int, ...]) -> OpCall:
        group, options = text.rsplit(";", 1)
        return OpCall(Options.read(options, counts), group)


def attention(
    q: Tensor, k: Tensor, v: Tensor, arrays: Arrays, dropout: Dropout | None, options: Options, group_name: str
) -> tuple[Tensor, Tensor]:
    """Compute ``ring_attention`` with its optional arrays, dropout and options given as records. Return (out, lse)."""
    tensors = [q, k, v, *[x for x in arrays if x is not None]]
    eager = eager_only(tensors)
    try:
        if not eager:
            refuse_transforms(tensors)
        if not eager or arrays.alibi_slopes is not None:  # of other plain tensors, problem_of and decide check each kind once
            check_tensors(q, k, v, arrays, group_name)
        if dropout is not None and options.dropout_rate:
            arrays = arrays._replace(dropout_seed=dropout_state(dropout, q.device))
            options = replace(options, dropout_offset=dropout.known_offset)
    except Exception as error:
        refuse(error, group_of(group_name))
    call = OpCall(options, group_name)
    results = None if torch.compiler.is_compiling() else _innermost.get()
    if results is not None and (known := results.known()) is not None:
        return Eager.apply(call, known, q, k, v, *arrays)[:2]
    if not eager:
        total = from_outputs(torch.ops.ring_attn.forward(q, k, v, options.counts, call.text, *arrays))
    elif torch.is_grad_enabled() and [x for x in tensors if x.requires_grad]:
        total = State(*Eager.apply(call, None, q, k, v, *arrays))
    else:
        total = forward(q, k, v, arrays, call, ahead=False)
    if results is not None:
        results.store(total)
    return total[:2]


def forward(q: Tensor, k: Tensor, v: Tensor, arrays: Arrays, call: OpCall, total: State | None = None, *, ahead: bool) -> State:
    """Decide with all ranks how to run the ring, and run it from the state ``total``. ``ahead``: see ``compile_call``."""
    with no_autocast(q.device.type):
        group = group_of(call.group)
        try:
            problem = problem_of(q, k, v, arrays, ranks_of(group), call.options)
        except Exception as error:
            refuse(error, group)
        decision = decide(problem, arrays, group, q.device, ahead=ahead)
        score, ring, keys = decision.score_with(arrays), decision.ring(group), decision.pack_keys(k, v, arrays)
        return loop.forward(q, keys, score, ring, decision.backend, total)


def backward(
    cotangents: Sequence[Tensor], saved: Sequence[Tensor], arrays: Arrays, call: OpCall
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and the gradient of the sinks (an empty tensor without sinks). ``cotangents``: (dout, dlse). ``saved``:
    (q, k, v, out, lse), then ``rest`` if the forward saved it."""
    (dout, dlse), (q, k, v, *total), group = cotangents, saved, group_of(call.group)
    decision = decide_backward(problem_of(q, k, v, arrays, ranks_of(group), call.options), arrays, group)
    with no_autocast(q.device.type):
        keys, score, ring = decision.pack_keys(k, v, arrays), decision.score_with(arrays), decision.ring(group)
        dq, dkv, dsinks = loop.backward(q, keys, State(*total), State(dout, dlse), score, ring, decision.backend)
    dk, dv = separate_gradients(dkv, k, v)
    dsinks = q.new_empty(0) if dsinks is None or arrays.sinks is None else dsinks.to(arrays.sinks.dtype)
    return dq if dq.dtype == q.dtype else dq.to(q.dtype), dk, dv, dsinks


NO_AUTOCAST = nullcontext()


def no_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context that disables autocast on ``device``, so that the state stays in at least float32."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else NO_AUTOCAST


def separate_gradients(dkv: Gradients, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return contiguous dk and dv in the dtypes of k and v. They share no memory, because an op's outputs must not alias."""
    if isinstance(dkv, tuple):
        dk, dv = dkv
        if dk.dtype == k.dtype:
            return dk, dv
        return dk.to(k.dtype), dv.to(v.dtype)
    dk, dv = dkv.split([k.shape[-1], v.shape[-1]], -1)
    return k.new_empty(k.shape).copy_(dk), v.new_empty(v.shape).copy_(dv)


LIBRARY = torch.library.Library("ring_attn", "DEF")
OPTIONAL = ", ".join(f"Tensor? {name}" for name in Arrays._fields)
"""The optional arrays as text: the last arguments in the schema of an op."""


def as_op(schema: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register a function as the op of ``schema`` on every device. A ``torch.library.custom_op`` would take longer per call."""
    LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    return torch.library.impl(LIBRARY, schema.partition("(")[0], "CompositeExplicitAutograd")


Outputs = tuple[Tensor, Tensor, Tensor]
"""The outputs of a forward op: out, lse and the rounding error of lse (an empty tensor if ``State.rest`` is None)."""


def as_outputs(total: State) -> Outputs:
    return total.out, total.lse, total.lse.new_empty(0) if total.rest is None else total.rest


def from_outputs(outputs: Outputs) -> State:
    out, lse, rest = outputs
    return State(out, lse, rest if rest.shape == lse.shape else None)


def fake_outputs(q: Tensor, v: Tensor) -> Outputs:
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((*q.shape[:3], v.shape[-1])), lse, torch.empty_like(lse) if carries_rest(q.dtype) else lse.new_empty(0)


@as_op(f"forward(Tensor q, Tensor k, Tensor v, SymInt[] counts, str call, {OPTIONAL}) -> (Tensor, Tensor, Tensor)")
def _forward(q: Tensor, k: Tensor, v: Tensor, counts: Sequence[int], call: str, *arrays: Tensor | None) -> Outputs:
    return as_outputs(forward(q, k, v, Arrays(*arrays), OpCall.read(call, tuple(counts)), ahead=True))


@torch.library.register_fake("ring_attn::forward")
def _(q, k, v, *_):  # type: ignore[no-untyped-def]
    return fake_outputs(q, v)


@as_op(
    f"backward(Tensor[] cotangents, Tensor[] saved, SymInt[] counts, str call, {OPTIONAL}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def _backward(
    cotangents: Sequence[Tensor], saved: Sequence[Tensor], counts: Sequence[int], call: str, *arrays: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return backward(cotangents, saved, Arrays(*arrays), OpCall.read(call, tuple(counts)))


@torch.library.register_fake("ring_attn::backward")
def _(cotangents, saved, counts, call, *arrays: Tensor | None):  # type: ignore[no-untyped-def]
    (q, k, v, *_), sinks = saved, Arrays(*arrays).sinks
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    q, k, v, ctx.counts, ctx.call, *arrays = inputs
    ctx.save_for_backward(*arrays, q, k, v, *from_outputs(output).arrays)


def saved_of(ctx: Any) -> tuple[tuple[Tensor, ...], Arrays]:
    """Return what the forward saved: (q, k, v, out, lse, with lse's rounding error if it was saved), and the optional arrays."""
    saved = ctx.saved_tensors  # read once, since a checkpoint recomputes them at each read
    optional = len(Arrays._fields)
    return saved[optional:], Arrays(*saved[:optional])


def _differentiate(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
    saved, arrays = saved_of(ctx)
    dq, dk, dv, dsinks = torch.ops.ring_attn.backward(cotangents[:2], saved, ctx.counts, ctx.call, *arrays)
    return dq, dk, dv, None, None, *_gradients(arrays, dsinks)


def _gradients(arrays: Arrays, dsinks: Tensor) -> Arrays:
    return Arrays(sinks=None if arrays.sinks is None else dsinks)


def refuse_second_derivative(ctx: Any, *_: Any) -> None:
    raise RuntimeError("ring_attention has no second derivative: call backward or torch.autograd.grad without create_graph=True")


torch.library.register_autograd("ring_attn::forward", _differentiate, setup_context=save_inputs)
torch.library.register_autograd("ring_attn::backward", refuse_second_derivative)


class Eager(torch.autograd.Function):
    """The ring as a plain autograd.Function. Torch does not dispatch its calls, so they take less time than calls of the op."""

    @staticmethod
    def forward(
        ctx: Any, call: OpCall, known: State | None, q: Tensor, k: Tensor, v: Tensor, *arrays: Tensor | None
    ) -> tuple[Tensor, ...]:
        total = forward(q, k, v, Arrays(*arrays), call, ahead=True) if known is None else known
        ctx.call = call
        ctx.save_for_backward(*arrays, q, k, v, *total.arrays)
        if total.rest is not None:
            ctx.mark_non_differentiable(total.rest)
        return total.arrays

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        call, (saved, arrays), cotangents = ctx.call, saved_of(ctx), cotangents[:2]
        use_op = torch.is_grad_enabled() or not eager_only([x for x in (*cotangents, *saved, *arrays) if x is not None])
        if use_op:  # the op refuses create_graph, and can be traced
            parts = torch.ops.ring_attn.backward(cotangents, saved, call.options.counts, call.text, *arrays)
        else:
            parts = backward(cotangents, saved, arrays, call)
        dq, dk, dv, dsinks = parts
        return None, None, dq, dk, dv, *_gradients(arrays, dsinks)


def eager_only(tensors: Iterable[Any]) -> bool:
    """Return True if no compiler, tracer, mode or transform is active, and tensors are of ``PLAIN`` types, not meta or nested."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
        and not [x for x in tensors if type(x) not in PLAIN or x.is_meta or x.is_nested]
    )


class StoredResults:
    """A context in which a recomputed function reuses stored results: each ``ring_attention`` call takes its state from
    ``known()``. If it is None, the call computes the state and passes it to ``store``. The context is reentrant, on any thread.
    """

    def __init__(self) -> None:
        self._tokens: list[Token[StoredResults | None]] = []

    def known(self) -> State | None:
        """Return the next stored state in call order, detached. Return None if the call must compute its state."""
        return None

    def store(self, total: State) -> None:
        """Store the attention state that a call computed."""

    def __enter__(self) -> None:
        self._tokens.append(_innermost.set(self))

    def __exit__(self, *_: object) -> None:
        _innermost.reset(self._tokens.pop())


_innermost: ContextVar[StoredResults | None] = ContextVar("ring_attn_stored_results", default=None)
