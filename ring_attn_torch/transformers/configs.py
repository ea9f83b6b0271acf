"""The config of a model while it attends over a ring: a copy, so that other models of the same config are not affected."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from .masks import NAME
from .models import hugging_face_model, text_config

IMPLEMENTATION = "_attn_implementation_internal"
"""The attribute in which a config stores the value of ``config._attn_implementation``."""


@contextmanager
def attending(model: nn.Module) -> Iterator[None]:
    """Make the part of ``model`` that reads tokens attend over the ring inside this ``with``.

    Its modules hold copies of their configs meanwhile. Attributes that are set in a copy are set in the config at the end.
    """
    pairs = _copies(hugging_face_model(model).config)
    before = [dict(vars(mine)) for _, mine in pairs]
    copy_of = {id(original): mine for original, mine in pairs}
    held = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig) and id(value) in copy_of
    ]
    for module, name, value in held:
        setattr(module, name, copy_of[id(value)])
    try:
        yield
    finally:
        for module, name, value in held:
            setattr(module, name, value)
        for (original, mine), then in zip(pairs, before, strict=True):
            _hand_back(original, vars(mine), then)
            vars(mine)[IMPLEMENTATION] = vars(original)[IMPLEMENTATION]  # for models that were made from the copy


def _copies(config: PreTrainedConfig) -> list[tuple[PreTrainedConfig, PreTrainedConfig]]:
    """Return (config, copy) of the config of the part that reads tokens, set to the ring, and of each config that contains it."""
    text = text_config(config)
    pairs = [(text, copy.copy(text))]
    vars(pairs[0][1])[IMPLEMENTATION] = NAME

    def copied(outer: PreTrainedConfig) -> PreTrainedConfig | None:
        """Return the copy of ``outer`` if it holds the text's config at any depth, and else None."""
        for original, mine in pairs:
            if original is outer:
                return mine
        parts = {name: copied(x) for name, x in vars(outer).items() if isinstance(x, PreTrainedConfig)}
        parts = {name: part for name, part in parts.items() if part is not None}
        if not parts:
            return None
        mine = copy.copy(outer)
        vars(mine).update(parts)
        pairs.append((outer, mine))
        return mine

    copied(config)
    return pairs


def _hand_back(config: PreTrainedConfig, now: dict[str, Any], before: dict[str, Any]) -> None:
    """Set in ``config`` the attributes that changed in its copy, except the attention implementation."""
    for name in before.keys() - now.keys():
        vars(config).pop(name, None)
    for name, value in now.items():
        if name != IMPLEMENTATION and (name not in before or value is not before[name]):
            vars(config)[name] = value
