"""The ring settings of a model, kept per model or in its config."""

from __future__ import annotations

from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel

from ring_attn_core.kernels.backends import BACKENDS, select
from ring_attn_core.layouts import named
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem

from ..ring.groups import group_name, group_of, is_dtensor
from .global_batch import ModelRing
from .masks import NAME
from .models import check_config, check_model, hugging_face_model, text_config

T = TypeVar("T", nn.Module, PreTrainedConfig)

_of_models: WeakKeyDictionary[PreTrainedModel, ModelRing] = WeakKeyDictionary()
KEPT = "ring_attention"
"""The attribute of a config that holds settings, as a dict that JSON can store."""


def enable(
    model_or_config: T,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str = "zigzag",
    strategy: str = "auto",
    backend: str = "auto",
) -> T:
    """Set a transformers model, or a config before its model is made, to ``attn_implementation="ring"``, and return it.

    ``group``, ``layout``, ``strategy``, ``backend``: as in :func:`ring_attention`; ``sequence_parallel(model)`` uses them. A
    config stores all but ``group``, which belongs to one process. Only a model's tokens are sharded: the parts that read images
    or sound keep their attention.

    Raise ValueError, with the names of the modules, if a model cannot run over a ring: layers other than softmax attention
    (Mamba, linear attention, convolutions), encoder-decoders, models whose attention is code of their own. Raise ValueError also
    if a backend does not exist, or if its kernels run on no device here.
    """
    named(layout)
    Options(layout=layout, strategy=strategy, backend=backend)
    _check_name(backend)
    if isinstance(model_or_config, PreTrainedConfig):
        check_config(model_or_config)
        if group is not None:
            raise ValueError("a config cannot keep group=...: pass it to enable(model, group) or sequence_parallel(model, group)")
        text = text_config(model_or_config)
        text._attn_implementation = NAME
        setattr(text, KEPT, {"layout": layout, "strategy": strategy, "backend": backend})
        return model_or_config
    check_model(model_or_config)
    if not torch.cuda.is_available():  # else the model may still go to a GPU
        check_backend(backend, device_of(model_or_config))
    model = hugging_face_model(model_or_config)
    _of_models[model] = ModelRing(group_of(group_name(group)), layout, strategy, backend)
    text_config(model.config)._attn_implementation = NAME
    return model_or_config


def ring_of_model(model: PreTrainedModel, group: dist.ProcessGroup | DeviceMesh | None, layout: str | None) -> ModelRing:
    """Return the ring of a model: the settings of ``enable``, with ``group`` and ``layout`` in their place if not None."""
    kept = getattr(text_config(model.config), KEPT, None) or {}
    ring = _of_models.get(model, ModelRing(group_of(group_name(None)), **kept))
    if group is not None:
        ring = ring._replace(group=group_of(group_name(group)))
    if layout is not None:
        named(layout)
        ring = ring._replace(layout=layout)
    return ring


def device_of(model: nn.Module) -> str:
    """Return the device type that a model computes on.

    It is "cpu" if all weights are there; FSDP2's weights count by their mesh.
    """
    kinds = {p.device_mesh.device_type if is_dtensor(p) else p.device.type for p in model.parameters()}
    return "cpu" if kinds == {"cpu"} else next(iter(kinds - {"cpu"}), "cpu")


def check_backend(backend: str, device: str) -> None:
    """Raise ValueError if ``backend`` does not exist, or if ``device`` is a CPU and it has no kernels for one.

    Its other requirements, of a GPU, dtypes and heads, are checked by the first call.
    """
    _check_name(backend)
    if device != "cpu" or backend == "auto":
        return
    heads = (1, 1, 1, 64)
    problem = Problem(
        heads, heads, heads, ("bfloat16", "bfloat16", "bfloat16"), device, 1, Options(backend=backend), framework="torch"
    )
    try:
        select(problem, backend)
    except ValueError as error:
        raise ValueError(
            f'backend={backend!r} is for models on a GPU, and this one is on a CPU: move it first, with model.to("cuda"), or '
            f"leave backend out of enable. {error}"
        ) from None


def _check_name(backend: str) -> None:
    names = ["auto", *(candidate.name for candidate in BACKENDS)]
    if backend not in names:
        raise ValueError(f"unknown backend {backend!r}: choose one of {', '.join(names)}")
