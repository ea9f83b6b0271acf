"""The mixers of hybrid models, linear recurrences and short convolutions, over the ring.

From transformers 5.15 on every such mixer calls functions of its modeling module by the same names. ``take_over_mixers`` replaces
them: in a call on shards they run ``ring_attn_torch.recurrence``, elsewhere the originals. Projections, norms and gates stay
transformers' own. A mixer is found by the code of its forward, not by the name of its class.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn import functional as F

from ring_attn_core.model.mixers import check_mixers_order

from ..functional.recurrences import step_sizes
from ..recurrence.convolution import convolve
from ..recurrence.delta_rule import delta_rule
from ..recurrence.runs import Where
from ..recurrence.state_space import scan
from ..ring.halo import wide
from .masks import CallArguments, CallRing, during, running

OLDEST_HYBRIDS = Version("5.15")
"""The first release of transformers whose mixers call the functions of ``FUNCTIONS``."""

TAKEN: set[Any] = set()

KEPT = {"output_final_state", "return_final_states", "return_last_state"}
"""Arguments by which a mixer asks for its last state."""


def mixers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of ``model`` that call one of ``FUNCTIONS``, by name."""
    return {name: module for name, module in model.named_modules() if functions_of(type(module))}


@cache
def functions_of(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names in ``FUNCTIONS`` that the forward of a class calls as globals, if a release with them wrote it."""
    forward: Any = inspect.unwrap(kind.forward)
    if older_release() or not getattr(forward, "__module__", "").startswith("transformers.models."):
        return frozenset()
    read = {step.argval for step in dis.get_instructions(forward) if step.opname == "LOAD_GLOBAL"}
    return frozenset(name for name in FUNCTIONS.keys() & read if callable(forward.__globals__.get(name)))


def beside_mixers(kind: Any) -> bool:
    """Return True if the modeling module of a model's class has one of ``FUNCTIONS``."""
    known = not older_release() and isinstance(kind, type)
    # The module of the forward: FSDP2 makes a class of its own of kind.
    return known and not FUNCTIONS.keys().isdisjoint(inspect.unwrap(kind.forward).__globals__)


def older_release() -> str:
    """Return the remedy for an error about a mixer, if transformers is too old to run any."""
    if Version(transformers.__version__) >= OLDEST_HYBRIDS:
        return ""
    return (
        f". Hybrid models run from transformers {OLDEST_HYBRIDS} on, whose mixers call functions that a ring can replace, and "
        f'this is {transformers.__version__}: pip install "transformers>={OLDEST_HYBRIDS}"'
    )


def check_mixers(model: nn.Module, ring: CallRing) -> None:
    for mixer in mixers(model).values():
        check_mixers_order(ring.order, type(mixer).__name__)
    if ring.layout == "striped" and ring.ranks > 1 and (found := mixers(model)):
        raise ValueError(
            f"{type(model).__name__} has linear layers ({next(iter(found))} for one), whose state goes from token to token, and "
            'striped gives each token\'s predecessor to another rank: pass layout="zigzag", "contiguous" or "balanced"'
        )


def take_over_mixers(model: nn.Module) -> list[nn.Module]:
    """Replace the functions of the model's mixers, for the whole process, and return the mixers."""
    found = [*mixers(model).values()]
    for mixer in found:
        scope = inspect.unwrap(type(mixer).forward).__globals__
        for name in functions_of(type(mixer)):
            if scope[name] not in TAKEN:
                scope[name] = _over_a_ring(scope[name], FUNCTIONS[name])
                TAKEN.add(scope[name])
    return found


def check_padding(call: CallArguments, local: int) -> None:
    """Raise ValueError if a hybrid model gets padding with one token a rank: transformers reads no mask of one token."""
    mask = call.by_name.get("attention_mask")
    if local == 1 < call.ring.ranks and mask is not None and not bool(mask.all()):
        raise ValueError(
            f"attention_mask has padding, and each of {call.ring.ranks} ranks one token of {call.shape[1]}, for which linear "
            f"layers of {call.name} read no mask: pad to more than {call.ring.ranks} tokens, or use fewer ranks"
        )


def check_called(mixer: nn.Module, *_: Any) -> None:
    """Raise ValueError if a mixer runs outside of a call of its model: it would compute a shard by itself."""
    if running() is None:
        raise ValueError(
            f"{type(mixer).__name__} runs inside sequence_parallel, outside of a call of its model, as when activation "
            "checkpointing of another library recomputes it: use model.gradient_checkpointing_enable(), and call the whole model"
        )


def in_this_call(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a layer's ``function`` that runs in this call, also when activation checkpointing recomputes it after the call."""
    call = running()
    if call is None or torch.compiler.is_compiling():
        return function

    def recomputed(*inputs: object) -> Tensor:
        if running() is not None:
            return function(*inputs)
        with during(call):
            return function(*inputs)

    return recomputed


def skip_compiling(model: nn.Module, checkpointed: Callable[..., Any]) -> Callable[..., Any]:
    """Return a checkpoint function that torch.compile leaves alone in a hybrid model: no graph keeps the call to recompute in."""
    return torch.compiler.disable(checkpointed) if mixers(model) else checkpointed


def _over_a_ring(original: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs ``compute`` in a call on shards or with documents, and ``original`` elsewhere."""

    def function(*args: Tensor, **kwargs: object) -> Any:
        call: Any = running()
        if call is None or not call.runs_mixers:
            return original(*args, **kwargs)
        if not torch.compiler.is_compiling():
            call.attention_calls += 1
        return _skip_compiling(compute, call, args, kwargs)

    return function


@torch.compiler.disable(reason="torch.compile does not follow the exchanges of linear layers: leave fullgraph=True out")
def _skip_compiling(compute: Callable[..., Any], call: Any, args: Any, kwargs: Any) -> Any:
    where = call.tokens_of(compute is _convolution)
    if not where.last and (asked := [name for name in KEPT if kwargs.get(name)]):
        raise ValueError(f"a mixer of {type(call.model).__name__} keeps a cache ({', '.join(asked)}), and this call has none")
    return compute(where, *args, **kwargs)


def _convolution(
    where: Where, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: object
) -> Tensor:
    x = hidden_states.transpose(1, 2)
    return convolve(x, weight, bias, activation, where).to(x.dtype).transpose(1, 2)


def _delta_rule(
    where: Where,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    return delta_rule({"q": query, "k": key, "v": value, "g": g, "beta": beta}, where, normalize=use_qk_l2norm_in_kernel)


def _run_structured(
    where: Where, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *_: Any, **more: Any
) -> Any:
    dt = step_sizes(dt, more.get("dt_bias"), more.get("dt_softplus", False)).clamp(*more.get("dt_limit", (0.0, float("inf"))))
    arrays = {"x": wide(hidden_states), "dt": dt, "A": A, "B": B, "C": C, "D": more.get("D")}  # the norm after it reads float32
    out, last = scan(arrays, where)
    return (out, last) if where.last else out


def _selective(where: Where, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **more: Any) -> Any:
    """Compute ``mamba_selective_scan``: tokens are the last dim of all arrays but A."""
    x, dt, B, C = (each.transpose(1, 2) for each in (hidden_states, dt, B, C))
    dt = step_sizes(dt, more.get("delta_bias"), more.get("delta_softplus", False))
    out, last = scan({"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": more.get("D")}, where)
    out = out.transpose(1, 2)
    out = out if more.get("z") is None else out * F.silu(more["z"])
    return (out, last) if where.last else out


def _nothing(*_: object, **__: object) -> None:
    """Return None, as the fused functions do without their package: the mixer then calls the others."""


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _run_structured,
    "mamba_selective_scan": _selective,
    "mamba2_split_conv1d_scan_combined": _nothing,
    "mamba_inner_fn": _nothing,
}
"""The functions of transformers' modeling modules that mix tokens, and what computes each over a ring."""
