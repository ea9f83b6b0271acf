"""Features of images that models add to the hidden states of several layers, besides those in inputs_embeds (DeepStack)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .global_batch import GlobalBatch

VISUAL = ("visual_pos_masks", "deepstack_visual_embeds")
"""Arguments of Qwen3-VL and similar models: the mask of image tokens, and the features added to these layer by layer."""

OTHERS = ("deepstack_features", "per_layer_inputs")
"""Arguments of other models that also belong to tokens, and are not split."""


def reader_of(model: PreTrainedModel, names: tuple[str, ...]) -> PreTrainedModel | None:
    """Return the innermost part of ``model`` whose forward takes one of the arguments ``names``, or None."""
    found = None
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not {*names}.isdisjoint(inspect.signature(module.forward).parameters):
            found = module
    return found


def check_visual(model: PreTrainedModel, given: dict[str, Any], shape: tuple[int, ...], cached: bool) -> None:
    """Raise ValueError if inputs_embeds come without the features that belong to them, or if features do not fit."""
    name, passed = type(model).__name__, [argument for argument in VISUAL if argument in given]
    if "inputs_embeds" not in given and not passed:
        return
    other = reader_of(model, OTHERS)
    if other is not None:
        raise ValueError(
            f"{name} adds more to its layers than inputs_embeds hold ({' or '.join(OTHERS)} of {type(other).__name__}), which "
            "sequence_parallel does not split: pass input_ids, and run batches with images unsharded"
        )
    if reader_of(model, VISUAL) is None:
        if passed:
            raise ValueError(f"{name} takes no {passed[0]}: leave it out")
        return
    mask, features = (given.get(argument) for argument in VISUAL)
    if "inputs_embeds" not in given or mask is None or features is None:
        raise ValueError(
            f"{name} adds features of images to the hidden states of its first layers, which inputs_embeds alone do not hold: "
            "pass inputs_embeds, visual_pos_masks [batch, length], True for tokens of images, and deepstack_visual_embeds, a "
            "list of [tokens of images, dim], together; for text alone an empty list and a mask of False"
        )
    if cached:
        raise ValueError(f"{name} got {VISUAL[0]} in a call with a cache, which knows text alone: leave use_cache out")
    if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{VISUAL[0]} must be {list(shape)}, [batch, length] of the whole sequence, got {got}")
    count, dim = int(mask.sum()), given["inputs_embeds"].shape[-1]
    for i, x in enumerate(features):
        if not isinstance(x, Tensor) or tuple(x.shape) != (count, dim):
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{VISUAL[1]}[{i}] must be {[count, dim]}, a row for each True of {VISUAL[0]}, got {got}")


def shards_of_features(whole: GlobalBatch, given: dict[str, Any]) -> dict[str, Any]:
    """Return the mask of this rank's image tokens [batch, local], and their rows of each layer's features."""
    mask = given[VISUAL[0]].to(whole.device).bool()
    number = (mask.flatten().long().cumsum(0) - 1).view(mask.shape)
    mine = whole.filled(mask, 0)
    rows = whole.shard(number)[mine]
    return {VISUAL[0]: mine, VISUAL[1]: [x.to(whole.device)[rows] for x in given[VISUAL[1]]] or None}


@contextmanager
def added(model: PreTrainedModel, features: dict[str, Any]) -> Iterator[None]:
    """Pass the features to the part of ``model`` that reads them, inside this ``with``; the models around it do not."""
    reader = reader_of(model, VISUAL)
    assert reader is not None and reader is not model

    def hand_over(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | features

    handle = reader.register_forward_pre_hook(hand_over, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
