"""Rotary embeddings whose angles depend on the length of the global sequence, of which a rank has a shard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .masks import current


def rotary_by_length(model: PreTrainedModel) -> list[nn.Module]:
    """Return the rotary embeddings whose angles depend on a call's largest position, which a shard alone does not know."""
    kinds = lambda module: (
        module.rope_type if isinstance(getattr(module, "rope_type", None), dict) else {"": getattr(module, "rope_type", "")}
    )
    return [module for module in model.modules() if {"dynamic", "longrope"} & set(kinds(module).values())]


@contextmanager
def told_the_longest(rotary: nn.Module) -> Iterator[None]:
    """Pass the global sequence's largest position to such a rotary embedding inside this ``with``.

    It is appended as one more token, whose angles are removed again.
    """

    def told() -> Tensor | None:
        whole = current()
        return None if whole is None else whole.longest

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        longest = told()
        if longest is None:
            return None
        given = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        more = torch.cat([given, longest.to(given.dtype).expand(*given.shape[:-1], 1)], -1)
        return (args[0], more, *args[2:]) if len(args) > 1 else args, kwargs | ({} if len(args) > 1 else {"position_ids": more})

    def after(_: nn.Module, args: tuple[Any, ...], angles: Any) -> Any:
        if told() is None:
            return None
        return angles[..., :-1, :] if isinstance(angles, Tensor) else tuple(x[..., :-1, :] for x in angles)

    handles = rotary.register_forward_pre_hook(before, with_kwargs=True), rotary.register_forward_hook(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
