"""The backends in the order in which "auto" tries them, each with its reasons for refusing a problem."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..plan.balanced_layout import BalancedLayout
from ..problem.options import Options
from ..problem.problem import Problem
from ..releases import warn_if_untried
from .compile import NEWEST_TRIED, broken_triton, is_interpreted, start, triton_release, triton_version
from .hopper.supports import refusal_of_shape
from .tile_sizes import DESIGN_LENGTHS, WIDEST, WIDEST_TAIL

if TYPE_CHECKING:
    from .call import RingCall
    from .launch import Launch

OLDEST_GPU = 80


@dataclass(frozen=True)
class Candidate:
    """A backend, with functions of a problem that return a reason or None. ``objection``: why it cannot run. ``drawback``: why
    "auto" skips it. ``leaves``: why "auto" takes it for the forward only."""

    name: str
    objection: Callable[[Problem], str | None]
    drawback: Callable[[Problem], str | None] = lambda problem: None
    leaves: Callable[[Problem], str | None] = lambda problem: None


def _balanced_objection(problem: Problem) -> str | None:
    """Return why the Triton kernels cannot run a balanced layout, or None. They take a shard as one run of local indices, so its
    positions must ascend; ALiBi and dropout need the positions themselves."""
    layout = problem.options.layout
    if not isinstance(layout, BalancedLayout) and not problem.traced_layout:
        return None
    if problem.options.order == "global":  # all tokens by position are one run
        return None
    if counted := {"alibi_slopes", "dropout_seed"}.intersection(array.name for array in problem.arrays):
        return f"{min(counted)} counts positions along runs, and those of a balanced layout are of any length"
    ordered = isinstance(layout, str) or layout.ascends
    return None if ordered else "the runs of a rank are not in order of position: make the layout with balanced_layout"


def _triton(problem: Problem) -> str | None:
    if not isinstance(problem.q_shape[0], int):
        return f"its kernels are launched for a known batch, and this one is the symbolic size {problem.q_shape[0]} of jax.export"
    if (unordered := _balanced_objection(problem)) is not None:
        return unordered
    if not problem.capability:
        return f"its kernels run on NVIDIA GPUs, and these arrays are on {problem.device}"
    if problem.capability < OLDEST_GPU:
        return f"its kernels need a GPU of compute capability 8.0 (sm_80), and this one is sm_{problem.capability}"
    if (broken := broken_triton()) is not None:
        return broken
    if problem.dtypes[0] == "float64":
        return "its kernels take bfloat16, float16 and float32, not float64"
    return _too_wide(problem)


def _too_wide(problem: Problem) -> str | None:
    """Return why heads of a problem are too wide for the Triton kernels, or None."""
    head_dim, v_dim = problem.q_shape[-1], problem.v_shape[-1]
    if problem.options.values_in_keys and v_dim <= WIDEST and head_dim - v_dim <= WIDEST_TAIL:
        return None
    for name, width in (("head_dim", head_dim), ("v_dim", v_dim)):
        if width > WIDEST:
            return f"its kernels take head sizes of at most {WIDEST}, and {name} is {width}"
    return None


def _triton_tf32(problem: Problem) -> str | None:
    objection = _triton(problem)
    if objection is None and problem.dtypes[0] != "float32":
        objection = f'tf32 is for float32 inputs, and these are {problem.dtypes[0]}: use "triton"'
    return objection


def _has_gluon() -> bool:
    try:
        return find_spec("triton.experimental.gluon") is not None
    except Exception:  # the import of the parent packages may raise anything
        return False


def _hopper(problem: Problem) -> str | None:
    if not problem.capability or not isinstance(problem.q_shape[0], int) or _balanced_objection(problem) is not None:
        return _triton(problem)
    if problem.capability != 90:
        return f"its kernels are for Hopper GPUs (sm_90), and this one is sm_{problem.capability}"
    if (broken := broken_triton()) is not None:
        return broken
    if not _has_gluon():
        return "its kernels are written in Gluon, which this triton does not have: pip install 'triton>=3.6'"
    if not problem.tma:
        return "its kernels read by TMA descriptors, which this jaxlib cannot make: pip install 'jaxlib>0.11.0'"
    return refusal_of_shape(problem.dtypes[0], problem.q_shape[-1], problem.v_shape[-1])


def _untried_objection() -> str | None:
    if triton_release() > NEWEST_TRIED:
        newest = ".".join(map(str, NEWEST_TRIED))
        return f"Triton {triton_version()} is newer than {newest}, the newest that its kernels were tried with"
    return None


def _slower_than_portable(problem: Problem) -> str | None:
    """Return why Hopper's backward is slower than the portable backward; None if it is not slower.

    If it is slower, "auto" runs the portable backward. Milliseconds of the backward on one H200, with 2 x 8,192 tokens, a causal
    mask and 16 heads of 64:

                      softcap: Hopper    portable    dropout: Hopper    portable
        Triton 3.6               1.79        3.53               2.18        3.13
        Triton 3.9               3.34        3.05               3.67        3.58

    With heads of 128 Hopper's backward is faster on both releases.
    """
    softcap, dropout_rate = problem.options.softcap, problem.options.dropout_rate
    if triton_release() >= (3, 9) and problem.q_shape[-1] <= 64 and (softcap is not None or dropout_rate > 0):
        feature = "dropout" if softcap is None else "softcap"
        return f"its backward of heads of 64 with {feature} is out of registers with Triton {triton_version()}, and slower"
    return None


def _vendor(problem: Problem, widest: int) -> str | None:
    """Return why a problem exceeds a limit that FlashAttention-2, FlashAttention-4 and cuDNN share, or None."""
    if problem.framework != "torch":
        return "it is there in PyTorch only"
    if isinstance(problem.options.layout, BalancedLayout):
        return "it takes runs of equal length, and those of a balanced layout are of any length"
    if problem.options.mask.hi is not None:
        return "it knows no windows: masks without an upper side only"
    names = [array.name for array in problem.arrays if array.name not in ("sinks", "dropout_seed")]
    names += ["softcap"] * (problem.options.softcap is not None) + ["dropout_rate"] * (problem.options.dropout_rate > 0)
    if names:
        return f"it does not take {', '.join(names)}"
    if problem.scale <= 0:
        return f"it multiplies by the scale after hiding keys, so that must be positive, and is {problem.scale}"
    if problem.q_shape[-1] != problem.v_shape[-1]:
        return f"its values are as wide as its keys, and head_dim is {problem.q_shape[-1]} and v_dim {problem.v_shape[-1]}"
    if problem.device == "cpu":
        return None
    if problem.capability < OLDEST_GPU:
        return f"its kernels run on NVIDIA GPUs from sm_80 on, and these arrays are on {problem.device}"
    if problem.dtypes[0] not in ("bfloat16", "float16"):
        return f"its kernels take bfloat16 and float16, not {problem.dtypes[0]}"
    if problem.q_shape[-1] % 8 or problem.q_shape[-1] > widest:
        return f"it takes head sizes that 8 divides, of at most {widest}, and head_dim is {problem.q_shape[-1]}"
    return None


def _flash(problem: Problem) -> str | None:
    return _vendor(problem, widest=256)


def _flash4(problem: Problem) -> str | None:
    if problem.framework == "torch":
        if problem.device == "cpu":
            return f"its kernels run on NVIDIA GPUs, and these arrays are on {problem.device}"
        if OLDEST_GPU <= problem.capability < 90:
            return f"its backward runs on NVIDIA GPUs from sm_90 on, and this one is sm_{problem.capability}"
        if not _has_flash4():
            return "the package is not installed: pip install flash-attn-4"
    return _vendor(problem, widest=128)


@cache
def _has_flash4() -> bool:
    """Return whether flash_attn.cute is installed; search for its file, because an import takes seconds."""
    spec = find_spec("flash_attn")
    folders = spec.submodule_search_locations if spec else None
    return any((Path(folder) / "cute" / "interface.py").exists() for folder in folders or ())


def _cudnn(problem: Problem) -> str | None:
    if problem.framework == "torch" and problem.device == "cpu":
        return f"its kernels run on NVIDIA GPUs, and these arrays are on {problem.device}"
    return _vendor(problem, widest=128)


def check_vendor(options: Options, differentiates_lse: bool) -> None:
    """Raise ValueError if a backend of ``VENDORS`` is asked for deterministic gradients or for the gradient of lse."""
    backend = options.backend
    if backend in VENDORS and options.deterministic:
        raise ValueError(f'backend={backend!r} adds gradients in any order, so it is not deterministic: use backend="auto"')
    if backend in VENDORS and differentiates_lse:
        raise ValueError(
            f'the lse of backend={backend!r} has no gradient: leave out return_lse, call it under torch.no_grad(), or use "auto"'
        )


BACKENDS: tuple[Candidate, ...] = (
    Candidate("hopper", _hopper, lambda problem: _untried_objection(), _slower_than_portable),
    Candidate("triton", _triton),
    Candidate("triton_tf32", _triton_tf32, lambda problem: "it is less precise than its inputs"),
    Candidate("flash", _flash, lambda problem: "it is there to compare with"),
    Candidate("flash4", _flash4, lambda problem: "it is there to compare with"),
    Candidate("cudnn", _cudnn, lambda problem: "it is there to compare with"),
    Candidate("blockwise", lambda problem: None),
)

VENDORS = "flash", "flash4", "cudnn"
"""The backends that call kernels of other packages."""


PASSES = "forward", "backward"


def runnable(problem: Problem, anywhere: bool = False, passes: Collection[str] = PASSES) -> RingCall | None:
    """Select a backend, compile its kernels and return the launch parameters; None for "blockwise" or a backend of ``VENDORS``.
    ``anywhere``: runs may start at any position. If a kernel cannot run or spills, "auto" warns and takes the next backend, or
    for one pass of "hopper" the portable kernels."""
    from .call import call_of

    heads = f"for {problem.dtypes[0]} heads of {problem.q_shape[-1]} and {problem.v_shape[-1]}"
    automatic = problem.options.backend == "auto"
    failed: list[str] = []
    portable = _left_to_portable(problem)
    while True:
        chosen = select(problem, problem.options.backend, failed)
        if chosen in VENDORS and anywhere:
            raise ValueError(f'backend={chosen!r} cannot run this: the lse of a block has no gradient there. backend="auto" can')
        if chosen in ("blockwise", *VENDORS):
            expected = automatic and not failed and problem.capability >= OLDEST_GPU  # a kernel, and no warning was given
            if expected and (reason := _balanced_objection(problem) or broken_triton()) is not None:
                warnings.warn(f"triton: {reason}. backend={chosen!r} runs this instead, slower", stacklevel=2)
            return None
        if automatic and chosen == "triton" and "hopper" not in failed and (untried := _new_to_hopper(problem)):
            warnings.warn(f"hopper: {untried}. backend='triton' runs this instead, slower", stacklevel=2)
        call = call_of(problem, chosen, anywhere, portable)
        found = _obstacles(call, problem, passes)
        if not found:
            if not (automatic and _new_to_hopper(problem)):  # else a warning was already given
                warn_if_untried("triton")
            return call
        reasons = "; ".join(f"in the {name} {reason}" for name, reason in found.items())
        if not automatic:
            raise ValueError(f'backend={chosen!r} cannot run this: {reasons} ({heads}). backend="blockwise" can')
        takes_portable = portable.issuperset(found)
        name = "triton" if takes_portable else chosen
        if chosen == "hopper" and not takes_portable and len(found) == 1:
            portable |= frozenset(found)
            instead = f"backend='triton' runs the {next(iter(found))}"
        else:
            failed += [chosen, "triton"] if portable else [chosen]
            portable = frozenset()
            instead = f"backend={select(problem, 'auto', failed)!r} runs this"
        warnings.warn(f"{name}: {reasons} ({heads}). {instead} instead, slower", stacklevel=2)


def launches(problem: Problem) -> list[Launch]:
    """Return the launches of the selected backend, the last ones of the backward's other designs for shards of other lengths."""
    call = _select_call(problem, anywhere=False)
    return [] if call is None else [*_of_passes(call, problem, PASSES), *_of_other_lengths(call, problem, PASSES)]


def begin_backward(problem: Problem, anywhere: bool = False) -> None:
    """Begin to compile the backward's kernels in other processes; ``runnable`` waits for them and finds their obstacles."""
    call = _select_call(problem, anywhere)
    if call is not None:
        _begin(call, problem, PASSES[1:])


def _select_call(problem: Problem, anywhere: bool) -> RingCall | None:
    """Return the launch parameters by the backend that ``select`` returns; None if this backend has no kernels."""
    from .call import call_of

    chosen = select(problem, problem.options.backend)
    return None if chosen in ("blockwise", *VENDORS) else call_of(problem, chosen, anywhere, _left_to_portable(problem))


def _begin(call: RingCall, problem: Problem, passes: Collection[str]) -> None:
    if not is_interpreted():
        start(_of_passes(call, problem, passes), problem.capability, _of_other_lengths(call, problem, passes))


def _of_passes(call: RingCall, problem: Problem, passes: Collection[str]) -> list[Launch]:
    return [launch for name in passes for launch in _launches(call, problem, name)]


def _of_other_lengths(call: RingCall, problem: Problem, passes: Collection[str]) -> list[Launch]:
    if not call.hopper or PASSES[1] not in passes:
        return []
    return [launch for tokens in DESIGN_LENGTHS for launch in _launches(call.of_length(tokens), problem, PASSES[1])]


def _obstacles(call: RingCall, problem: Problem, passes: Collection[str]) -> dict[str, str]:
    """Return, for each pass whose kernels cannot run, the reason in words; an empty dict if all can run."""
    from .obstacles import obstacle

    _begin(call, problem, passes)
    launches = {name: _launches(call, problem, name) for name in passes}
    found = {name: obstacle(launch, problem.capability, problem.options.backend != "auto") for name, launch in launches.items()}
    return {name: reason for name, reason in found.items() if reason is not None}


def _launches(call: RingCall, problem: Problem, name: str) -> list[Launch]:
    """Return the launches of a pass, "forward" or "backward"; the backward's do not repeat launches of the forward."""
    from . import steps

    return list({"forward": steps.of_forward, "backward": steps.of_backward}[name](call, len(problem.steps.shifts)))


def _left_to_portable(problem: Problem) -> frozenset[str]:
    """Return the passes that "auto" runs by the portable kernels because these are faster."""
    return frozenset(("backward",) if problem.options.backend == "auto" and _slower_than_portable(problem) else ())


def _new_to_hopper(problem: Problem) -> str | None:
    """Return why "auto" skips Hopper's kernels, if the only reason is an untested release of Triton; else return None."""
    return _untried_objection() if _hopper(problem) is None else None


def check_backend(backend: str, framework: str = "torch") -> None:
    """Raise ValueError if ``backend`` is neither "auto" nor a backend of either framework. It lists those of ``framework``."""
    names = [candidate.name for candidate in BACKENDS if framework == "torch" or candidate.name not in VENDORS]
    if backend != "auto" and backend not in [candidate.name for candidate in BACKENDS]:
        raise ValueError(f'unknown backend {backend!r}: choose "auto" or one of {", ".join(names)}')


def _objection(candidate: Candidate, problem: Problem) -> str | None:
    """Return why a candidate cannot run a problem, or None."""
    if problem.options.order == "global" and candidate.name in VENDORS:
        return 'its order of additions depends on the ranks, so it cannot keep order="global"'
    return candidate.objection(problem)


def select(problem: Problem, backend: str = "auto", failed: Collection[str] = ()) -> str:
    """Return ``backend`` if it has no objection; for "auto", the first one not in ``failed`` without objection or drawback."""
    check_backend(backend, problem.framework)
    objections = []
    for candidate in BACKENDS:
        if backend == candidate.name:
            if (objection := _objection(candidate, problem)) is not None:
                raise ValueError(f'backend={backend!r} cannot run this: {objection}. backend="auto" takes {select(problem)!r}')
            return backend
        if backend == "auto" and candidate.name not in failed:
            objection = _objection(candidate, problem) or candidate.drawback(problem)
            if objection is None:
                return candidate.name
            objections.append(f"{candidate.name}: {objection}")
    raise ValueError(f"backend={backend!r} cannot run this: " + "; ".join(objections))
