"""The registry of variants, the functions that can be compared. Each is a record with its calls, objection and oracle.

A call, ``module:function``, builds the variant's function; only processes of the call's framework import it. An objection says
why the variant cannot run a case. An oracle computes exact results. To add a variant, write its call in ``torch_calls.py``,
``jax_calls.py`` or both, and add a record here. For a new computation also add an oracle to ``oracles.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from ring_attn_core.variants.dilated import Patterns, batches_of
from ring_attn_core.variants.summary import SummaryOptions

from .cases import Case

FRAMEWORKS = "jax", "torch"
HERE = __name__.rpartition(".")[0]

Objection = Callable[[Case, str, int], str | None]
"""A function ``objection(case, framework, ranks)`` that returns why a variant cannot run, or None."""


@dataclass(frozen=True, eq=False)
class Variant:
    """One function that can be compared; ``user``: its ``module:function`` if it is the user's own.
    ``calls``: by framework. ``oracle``: key in ``ORACLES``. ``changes``: values that replace fields of a case. ``needs``: by
    framework, the imported module and its pip package. ``pair``: equal names are compared across frameworks."""

    name: str
    calls: dict[str, str]
    says: str = ""
    oracle: str = "attention"
    changes: dict[str, Any] = field(default_factory=dict)
    objection: Objection = lambda case, framework, ranks: None
    needs: dict[str, tuple[str, str]] = field(default_factory=dict)
    user: str | None = None
    pair: str = ""

    def case(self, case: Case) -> Case:
        """Return ``case`` with this variant's changes."""
        return replace(case, **self.changes) if self.changes else case

    def refusal(self, case: Case, framework: str, ranks: int) -> str | None:
        """Return why the variant cannot run the case in the framework on ``ranks`` ranks, or None. The run may still fail."""
        if framework not in self.calls:
            return f"it is there in {' and '.join(TITLES[name] for name in self.calls)} only"
        module, package = self.needs.get(framework, ("", ""))
        if module and find_spec(module) is None:
            return f"not installed: run pip install {package}"
        return self.objection(case, framework, ranks)


TITLES = {"jax": "JAX", "torch": "PyTorch"}


def both(name: str) -> dict[str, str]:
    """Return the two calls of a variant, by framework: the function ``name`` in jax_calls.py and the one in torch_calls.py."""
    return {framework: f"{HERE}.{framework}_calls:{name}" for framework in FRAMEWORKS}


def only_torch(name: str) -> dict[str, str]:
    return {"torch": f"{HERE}.torch_calls:{name}"}


def _takes(case: Case, *known: str) -> str | None:
    """Return an objection if the case uses features whose names are not in ``known``, else None."""
    unknown = [name for name in case.features if name not in known]
    return f"it does not take {', '.join(unknown)}" if unknown else None


def _objection(make: Callable[[], object]) -> str | None:
    """Call ``make``. Return the message of the ValueError that it raises, or None if it raises none."""
    try:
        make()
    except ValueError as error:
        return str(error)
    return None


def _backend(case: Case, framework: str, ranks: int) -> str | None:
    """Return the library's error if the case's backend cannot run on a CPU, else None; on a GPU the variant itself raises it."""
    if case.device == "gpu":
        return None
    from ring_attn_core.kernels.backends import select

    return _objection(lambda: select(replace(case.problem(ranks), framework=framework), case.backend))


def _vendor(case: Case, framework: str, ranks: int) -> str | None:
    if case.device == "cpu":
        return "its kernels run on NVIDIA GPUs: pass --device gpu where there is one"
    return _takes(case, "scale", "sinks")


def _transformer(case: Case, framework: str, ranks: int) -> str | None:
    if case.dtype not in ("float32", "float64"):
        return f"its truth is written for float32 and float64, not {case.dtype}"
    return _module(case, framework, ranks) or _takes(case, "softcap", "sinks", "alibi_slopes", "extents", "key_mask")


def _module(case: Case, framework: str, ranks: int) -> str | None:
    if case.head_dim % 2:
        return f"its rotary embedding turns pairs, and head_dim is {case.head_dim}: pass an even one"
    if case.scale is not None:
        return "it does not take scale"
    return _backend(case, framework, ranks)


def _dilated(case: Case, framework: str, ranks: int) -> str | None:
    patterns = Patterns(case.segments, case.dilations, case.mixing)
    wrong = _objection(lambda: batches_of(case.problem(ranks), patterns))
    return wrong or _takes(case, "scale", "softcap", "key_mask") or _backend(case, framework, ranks)


def _summary(case: Case, framework: str, ranks: int) -> str | None:
    wrong = None if case.mask == "causal" else f"it is causal attention, and the mask is {case.mask}"
    wrong = wrong or _objection(lambda: SummaryOptions(block=case.block, window=case.window, summaries=case.summaries))
    return wrong or _takes(case, "scale", "softcap", "key_mask") or _backend(case, framework, ranks)


def _causal_or_full(case: Case) -> str | None:
    return None if case.mask in ("causal", "full") else f"it knows causal and full masks, not {case.mask}"


def _one_device(case: Case, framework: str, ranks: int) -> str | None:
    return "it is attention on one device" if ranks > 1 else _takes(case, "scale", "extents", "key_mask")


def _even(case: Case, pieces: int) -> str | None:
    return f"it needs a length that {pieces} divides, and it is {case.length}" if case.length % pieces else None


def _on_gpu(case: Case, dtypes: tuple[str, ...] = ("bfloat16", "float16")) -> str | None:
    if case.device == "cpu":
        return "its kernels run on NVIDIA GPUs: pass --device gpu where there is one"
    return None if case.dtype in dtypes else f"its kernels take {' and '.join(dtypes)}, not {case.dtype}"


def _context_parallel(case: Case, framework: str, ranks: int) -> str | None:
    return _on_gpu(case) or _takes(case) or _causal_or_full(case) or _even(case, 2 * ranks)


def _ring_flash_attn(case: Case, framework: str, ranks: int) -> str | None:
    wrong = None if case.mask == "causal" else f"its zigzag ring knows causal masks only, not {case.mask}"
    return _on_gpu(case) or _takes(case, "scale") or wrong or _even(case, 2 * ranks)


def _ring_attention_pytorch(case: Case, framework: str, ranks: int) -> str | None:
    grouped = case.kv_heads != case.heads
    wrong = "it reads key heads in another order: pass as many --kv-heads as --heads" if grouped else None
    return wrong or _takes(case) or _causal_or_full(case) or _even(case, ranks)


def _ringattention(case: Case, framework: str, ranks: int) -> str | None:
    grouped = case.kv_heads != case.heads
    wrong = "it knows no grouped key heads: pass as many --kv-heads as --heads" if grouped else None
    return wrong or _takes(case) or _causal_or_full(case) or _even(case, ranks)


_RECORDS = [
    Variant("ring", both("ring"), "ring_attention, any layout, mask, feature, strategy and backend", objection=_backend),
    Variant("layer", both("layer"), "RingAttention, the gradient of every weight", oracle="layer", objection=_module),
    Variant("transformer", both("transformer"), "a small RingTransformer: logits, loss, the gradient of every weight",
            oracle="transformer", objection=_transformer),
    Variant("dilated", both("dilated"), "dilated_attention, as in LongNet", oracle="dilated",
            changes={"layout": "contiguous"}, objection=_dilated),
    Variant("summary", both("summary"), "summary_attention, approximate: exact within a window, summaries of blocks beyond",
            oracle="summary", changes={"layout": "contiguous"}, objection=_summary),
    *(Variant(name, only_torch("vendor"), f"the ring with {whose}", changes={"backend": name}, objection=_vendor)
      for name, whose in (("flash", "FlashAttention-2"), ("cudnn", "cuDNN"), ("flash4", "FlashAttention-4"))),
    Variant("sdpa", only_torch("sdpa"), "torch's scaled_dot_product_attention, one device", objection=_one_device),
    Variant("torch-context-parallel", only_torch("context_parallel"), "torch.distributed.tensor.experimental",
            changes={"layout": "zigzag"}, objection=_context_parallel),
    Variant("ring-flash-attn", only_torch("ring_flash_attn"), "the package of that name, zigzag",
            changes={"layout": "zigzag"}, objection=_ring_flash_attn, needs={"torch": ("ring_flash_attn", "ring-flash-attn")}),
    Variant("ring-attention-pytorch", only_torch("ring_attention_pytorch"), "the package of that name, striped",
            changes={"layout": "striped"}, objection=_ring_attention_pytorch,
            needs={"torch": ("ring_attention_pytorch", "ring-attention-pytorch")}),
    Variant("ringattention", {"jax": f"{HERE}.jax_calls:ringattention"}, "the package of that name, in JAX",
            changes={"layout": "contiguous"}, objection=_ringattention, needs={"jax": ("ringattention", "ringattention")}),
]  # fmt: skip
VARIANTS = {variant.name: replace(variant, pair=variant.name) for variant in _RECORDS}

ALL = "all"
"""The name that stands for every variant in ``VARIANTS``; those that cannot run are reported with the reason."""


def chosen(names: tuple[str, ...]) -> list[Variant]:
    """Return the variants of ``names`` without duplicates; a user's own is ``module:function`` or, for JAX, ``jax:...``."""
    if not names:
        raise ValueError(f"name what to compare: {', '.join([*VARIANTS, ALL])}, or module:function of your own")
    found: list[Variant] = []
    for name in names:
        if ":" in name:
            found.append(_of_user(name, found))
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


def _of_user(name: str, before: list[Variant]) -> Variant:
    framework, _, rest = name.partition(":")
    where, text = ((framework,), rest) if framework in FRAMEWORKS and ":" in rest else (FRAMEWORKS, name)
    module, _, function = text.partition(":")
    if not (module and function) or ":" in function or (framework in FRAMEWORKS and where == FRAMEWORKS):
        raise ValueError(f"cannot read {name!r}: write module:function, or jax:module:function or torch:module:function")
    calls = {each: f"{HERE}.{each}_calls:user" for each in where}
    # Pair the first function for JAX only with the first for PyTorch only, the second with the second, and so on.
    number = sum(each.user is not None and tuple(each.calls) == where for each in before)
    pair = text if where == FRAMEWORKS else f"user {number}"
    return Variant(name, calls, f"{text} of the user", user=text, pair=pair, objection=_user)


def _user(case: Case, framework: str, ranks: int) -> str | None:
    return None
