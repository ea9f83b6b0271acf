"""The registry of variants, the functions that can be compared. Each is a record with its calls, limits and oracle.

A call builds the variant's function in a process of its framework. An oracle computes exact results. To add a variant, write its
call in ``calls.py`` and add a record here. For a new computation also add an oracle to ``oracles.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ring_attn_core.kernels.backends import select
from ring_attn_core.problem.checks import DTYPES
from ring_attn_core.variants.dilated import Patterns, batches_of
from ring_attn_core.variants.summary import SummaryOptions

from . import calls
from .cases import Case

if TYPE_CHECKING:
    from .worker import Build

FRAMEWORKS = "jax", "torch"
TITLES = {"jax": "JAX", "torch": "PyTorch"}
FEATURES = "scale", "softcap", "sinks", "alibi_slopes", "dropout_rate", "key_mask", "extents"

Objection = Callable[[Case, str, int], str | None]
"""A function ``objection(case, framework, ranks)`` that returns why a variant cannot run, or None."""


@dataclass(frozen=True, eq=False)
class Variant:
    """One function that can be compared; ``user``: its ``module:function`` if it is the user's own.
    ``build``: in ``calls.py``. ``oracle``: key in ``ORACLES``. ``changes``: values that replace fields of a case. ``needs``: the
    imported module and its pip package. ``pair``: equal names are compared across frameworks. The limits: ``features`` and
    ``masks`` (() for any) that it takes, ``dtypes`` of its GPU kernels (() if it runs on CPUs), and ``pieces``, the number of
    equal pieces per rank that it cuts a sequence into (0 for any); ``objection`` says the others."""

    name: str
    build: Build
    oracle: str = "attention"
    frameworks: tuple[str, ...] = FRAMEWORKS
    changes: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, str] | None = None
    features: tuple[str, ...] = FEATURES
    masks: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    pieces: int = 0
    objection: Objection = lambda case, framework, ranks: None
    user: str | None = None
    pair: str = ""

    def case(self, case: Case) -> Case:
        return replace(case, **self.changes) if self.changes else case

    def refusal(self, case: Case, framework: str, ranks: int) -> str | None:
        """Return why the variant cannot run the case in the framework on ``ranks`` ranks, or None. The run may still fail."""
        if framework not in self.frameworks:
            return f"it is there in {' and '.join(TITLES[name] for name in self.frameworks)} only"
        if self.needs and find_spec(self.needs[0]) is None:
            return f"not installed: run pip install {self.needs[1]}"
        if self.dtypes and case.device == "cpu":
            return "its kernels run on NVIDIA GPUs: pass --device gpu where there is one"
        if self.dtypes and case.dtype not in self.dtypes:
            return f"its kernels take {' and '.join(self.dtypes)}, not {case.dtype}"
        if reason := self.objection(case, framework, ranks):
            return reason
        if unknown := [name for name in case.features if name not in self.features]:
            return f"it does not take {', '.join(unknown)}"
        if self.masks and case.mask not in self.masks:
            return f"it knows {' and '.join(self.masks)} masks only, not {case.mask}"
        if self.pieces and case.length % (pieces := self.pieces * ranks):
            return f"it needs a length that {pieces} divides, and it is {case.length}"
        return None


def _find_error(make: Callable[[], object]) -> str | None:
    try:
        make()
    except ValueError as error:
        return str(error)
    return None


def _check_backend(case: Case, framework: str, ranks: int) -> str | None:
    """Return the library's error if the case's backend cannot run on a CPU, else None; on a GPU the variant itself raises it."""
    run = replace(case.problem(ranks), framework=framework)
    return None if case.device == "gpu" else _find_error(lambda: select(run, case.backend))


def _check_layer(case: Case, framework: str, ranks: int) -> str | None:
    if case.head_dim % 2:
        return f"its rotary embedding turns pairs, and head_dim is {case.head_dim}: pass an even one"
    return _check_backend(case, framework, ranks)


def _check_transformer(case: Case, framework: str, ranks: int) -> str | None:
    if case.dtype not in ("float32", "float64"):
        return f"its truth is written for float32 and float64, not {case.dtype}"
    return _check_layer(case, framework, ranks)


def _check_dilated(case: Case, framework: str, ranks: int) -> str | None:
    patterns = Patterns(case.segments, case.dilations, case.mixing)
    return _find_error(lambda: batches_of(case.problem(ranks), patterns)) or _check_backend(case, framework, ranks)


def _check_summary(case: Case, framework: str, ranks: int) -> str | None:
    wrong = _find_error(lambda: SummaryOptions(block=case.block, window=case.window, summaries=case.summaries))
    return wrong or _check_backend(case, framework, ranks)


def _check_one_device(case: Case, framework: str, ranks: int) -> str | None:
    return "it is attention on one device" if ranks > 1 else None


def _check_ungrouped(case: Case, framework: str, ranks: int) -> str | None:
    return None if case.kv_heads == case.heads else "it groups query heads in another way: pass as many --kv-heads as --heads"


LAYER = tuple(name for name in FEATURES if name != "scale")
MODEL = tuple(name for name in LAYER if name != "dropout_rate")
APPROXIMATE = "scale", "softcap", "key_mask"
EITHER, HALF = ("causal", "full"), ("bfloat16", "float16")
CONTIGUOUS, ZIGZAG, STRIPED = ({"layout": name} for name in ("contiguous", "zigzag", "striped"))
JAX, TORCH = ("jax",), ("torch",)
RECORDS = [
    Variant("ring", calls.build_ring, objection=_check_backend),
    Variant("layer", calls.build_layer, "layer", features=LAYER, objection=_check_layer),
    Variant("transformer", calls.build_transformer, "transformer", features=MODEL, objection=_check_transformer),
    Variant("dilated", calls.build_dilated, "dilated", changes=CONTIGUOUS, features=APPROXIMATE, objection=_check_dilated),
    Variant("summary", calls.build_summary, "summary", changes=CONTIGUOUS, features=APPROXIMATE, masks=("causal",),
            objection=_check_summary),
    *(Variant(name, calls.build_vendor, frameworks=TORCH, changes={"backend": name}, features=("scale", "sinks"), dtypes=DTYPES)
      for name in ("flash", "cudnn", "flash4")),
    Variant("sdpa", calls.build_sdpa, frameworks=TORCH, features=("scale", "extents", "key_mask"), objection=_check_one_device),
    Variant("torch-context-parallel", calls.build_context_parallel, frameworks=TORCH, changes=ZIGZAG, features=(),
            masks=EITHER, dtypes=HALF, pieces=2),
    Variant("ring-flash-attn", calls.build_ring_flash_attn, frameworks=TORCH, changes=ZIGZAG,
            needs=("ring_flash_attn", "ring-flash-attn"), features=("scale",), masks=("causal",), dtypes=HALF, pieces=2),
    Variant("ring-attention-pytorch", calls.build_ring_attention_pytorch, frameworks=TORCH, changes=STRIPED,
            needs=("ring_attention_pytorch", "ring-attention-pytorch"), features=(), masks=EITHER, pieces=1,
            objection=_check_ungrouped),
    Variant("ringattention", calls.build_ringattention, frameworks=JAX, changes=CONTIGUOUS,
            needs=("ringattention", "ringattention"), features=(), masks=EITHER, pieces=1, objection=_check_ungrouped),
]  # fmt: skip
VARIANTS = {variant.name: replace(variant, pair=variant.name) for variant in RECORDS}

ALL = "all"
"""The name that stands for every variant in ``VARIANTS``; those that cannot run are reported with the reason."""


def choose(names: tuple[str, ...]) -> list[Variant]:
    """Return the variants of ``names`` without duplicates; a user's own is ``module:function`` or, for JAX, ``jax:...``."""
    if not names:
        raise ValueError(f"name what to compare: {', '.join([*VARIANTS, ALL])}, or module:function of your own")
    found: list[Variant] = []
    for name in names:
        if ":" in name:
            found.append(_make_user(name, found))
        elif name == ALL:
            found += VARIANTS.values()
        elif name in VARIANTS:
            found.append(VARIANTS[name])
        else:
            near = get_close_matches(name, VARIANTS, 1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(
                f"unknown variant {name!r}{meant}: choose {', '.join([*VARIANTS, ALL])}, or module:function of your own"
            )
    return list({variant.name: variant for variant in found}.values())


def _make_user(name: str, before: list[Variant]) -> Variant:
    framework, _, rest = name.partition(":")
    where, text = ((framework,), rest) if framework in FRAMEWORKS and ":" in rest else (FRAMEWORKS, name)
    module, _, function = text.partition(":")
    if not (module and function) or ":" in function or (framework in FRAMEWORKS and where == FRAMEWORKS):
        raise ValueError(f"cannot read {name!r}: write module:function, or jax:module:function or torch:module:function")
    # Pair the first function for JAX only with the first for PyTorch only, the second with the second, and so on.
    number = sum(each.user is not None and each.frameworks == where for each in before)
    pair = text if where == FRAMEWORKS else f"user {number}"
    return Variant(name, calls.build_user, frameworks=where, user=text, pair=pair)
