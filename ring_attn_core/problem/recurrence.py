"""One call of a recurrence, a convolution, a halo or a carry as plain data, with every check of it.

Delta rule: S [K, V] is a state for each head; g a number or a vector [K] (Yang et al., arXiv:2412.06464)

    S_t = S_{t-1} * exp(g_t)
    S_t = S_t + beta_t k_t (v_t - k_t' S_t)'
    out_t = scale q_t' S_t

State spaces of Mamba-2 (Dao and Gu, arXiv:2405.21060) and Mamba-1 (Gu and Dao, arXiv:2312.00752):

    Mamba-2    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t'     S [P, N] for each head, A a number     out_t = S_t C_t + D x_t
    Mamba-1    S_t = exp(dt_t A) * S_{t-1} + dt_t x_t B_t'   S [channels, N], A [channels, N]       out_t = S_t C_t + D x_t
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..layouts import padded_local, plain_length, slots
from ..masks import causal
from ..plan.balanced_layout import BalancedLayout
from ..plan.ring import RingPlan
from ..plan.run_order import RunOrder, run_order
from ..validation import in_words, is_integer

SUMMARIES = "float32", "float64"


def order_of(layout: Any, ranks: int, seq_local: int | None, length: Any, documents: bool) -> RunOrder:
    """Return the order of the runs of a call. Raise ValueError if they are not of consecutive tokens.

    ``seq_local``: tokens of a shard, or None: the fewest that hold ``length``. ``documents``: extents were passed. Without them
    a balanced layout's sequence is one document.
    """
    refuse_striped(layout, ranks)
    length = plain_length(length, layout, ranks)
    if seq_local is not None:
        tokens = seq_local
    elif isinstance(layout, BalancedLayout):
        tokens = layout.seq_local
    else:
        tokens = slots(layout) if length is None else padded_local(layout, ranks, length)
    plan = (
        RingPlan(layout, causal(), ranks, tokens) if length is None else RingPlan(layout, causal(), ranks, tokens, length=length)
    )
    return run_order(plan, documents)


def refuse_striped(layout: Any, ranks: int) -> None:
    if layout == "striped" and ranks > 1:
        raise ValueError(
            "a recurrence needs runs of consecutive tokens, and the layout striped gives each token's predecessor to another "
            'rank: shard with layout="zigzag", "contiguous" or "balanced"'
        )


def check_width(width: Any) -> None:
    if not is_integer(width) or width < 1:
        raise ValueError(f"width is the number of tokens before each run, an int of at least 1, got {in_words(width)}")


def check_extents_of(shape: Sequence[int], extents: Sequence[int] | None, integers: bool) -> None:
    """Raise ValueError if extents are not integers [batch or 1, tokens, 2]. ``shape``: [batch, tokens], or [batch] of a carry."""
    if extents is None:
        return
    rows, tokens = shape[0], shape[1] if len(shape) > 1 else "tokens"
    fits = integers and len(extents) == 3 and extents[0] in (1, rows) and extents[2] == 2
    if not fits or tokens not in ("tokens", extents[1]):
        raise ValueError(
            f"extents must be integers [{rows}, {tokens}, 2], this rank's shard of document_extents, got {list(extents)}"
        )


def check_carry(
    bias: Sequence[int], dtype: str, decay: Sequence[int] | None, transition: Sequence[int] | None, runs: int
) -> None:
    if dtype not in SUMMARIES:
        raise ValueError(
            f"carry takes float32 or float64, got {dtype}: a chain of 16 runs in bfloat16 is wrong by 4e-3. Compute each run's "
            "bias and decay or transition in float32"
        )
    if len(bias) < 4 or bias[1] != runs:
        raise ValueError(f"bias must be [batch, runs, ..., K, V] with the {runs} runs of this layout, got {list(bias)}")
    if (decay is None) == (transition is None):
        raise ValueError(f"carry takes either decay= or transition=, got {'neither' if decay is None else 'both'}")
    if transition is not None and list(transition) != [*bias[:-1], bias[-2]]:
        raise ValueError(f"transition must be {[*bias[:-1], bias[-2]]}, a K x K matrix for each bias, got {list(transition)}")
    if decay is not None and (len(decay) != len(bias) or any(d not in (1, n) for d, n in zip(decay, bias, strict=True))):
        raise ValueError(
            f"decay must broadcast to bias {list(bias)}, with as many dims, got {list(decay)}: a number a head is [..., 1, 1], "
            "one a row [..., K, 1]"
        )


def check_convolution(x: Sequence[int], weight: Sequence[int], bias: Sequence[int] | None, activation: Any) -> None:
    if len(x) != 3 or len(weight) != 2 or weight[0] != x[2] or weight[1] < 1:
        raise ValueError(
            f"causal_conv takes x [batch, tokens, channels] and weight [channels, taps], got {list(x)} and {list(weight)}: of a "
            "torch.nn.Conv1d pass weight.squeeze(1)"
        )
    if bias is not None and list(bias) != [x[2]]:
        raise ValueError(f"bias must be [{x[2]}], one for each channel, got {list(bias)}")
    if activation not in (None, "silu", "swish"):
        raise ValueError(f'activation must be None, "silu" or "swish", got {in_words(activation)}')


def check_delta_rule(shapes: Mapping[str, Sequence[int]], backend: Any) -> None:
    q, k, v, g, beta = (list(shapes[name]) for name in ("q", "k", "v", "g", "beta"))
    check_backend(backend)
    if len(q) != 4 or k != q or len(v) != 4 or v[:2] != q[:2] or v[2] % q[2]:
        raise ValueError(
            f"q and k must be [batch, tokens, heads, K] and v [batch, tokens, v heads, V], with heads dividing v heads, got {q}, "
            f"{k} and {v}"
        )
    if g not in (v[:3], [*v[:3], q[3]]) or beta != v[:3]:
        raise ValueError(
            f"g must be {v[:3]}, a log decay a head, or {[*v[:3], q[3]]}, one a channel, and beta {v[:3]}; got {g} and {beta}"
        )


def check_state_space(shapes: Mapping[str, Sequence[int] | None], backend: Any) -> None:
    x, dt, A, B, C = (list(shapes[name] or ()) for name in ("x", "dt", "A", "B", "C"))
    D = shapes["D"]
    check_backend(backend)
    if len(A) == 1:
        fits = (
            len(x) == 4 and x[2:3] == A and dt == x[:3] and len(B) == 4 and B[:2] == x[:2] and B == C and B[2] and not A[0] % B[2]
        )
        expected = (
            "with A [heads], Mamba-2: x [batch, tokens, heads, P], dt [batch, tokens, heads], B and C [batch, tokens, groups, N]"
        )
    else:
        fits = len(x) == 3 and len(A) == 2 and A[:1] == x[2:] and dt == x and B == C == [*x[:2], *A[1:]]
        expected = "with A [channels, N], Mamba-1: x and dt [batch, tokens, channels], B and C [batch, tokens, N]"
    if not fits or (D is not None and list(D) != A[:1]):
        raise ValueError(
            f"{expected}, D as long as A; got x {x}, dt {dt}, A {A}, B {B}, C {C}, D {None if D is None else list(D)}"
        )


def check_backend(backend: Any) -> None:
    if backend not in ("auto", "blockwise"):
        raise ValueError(
            f'a recurrence has the backends "auto" and "blockwise", in plain array operations, got {in_words(backend)}'
        )
