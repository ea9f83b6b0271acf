"""Features of images that a model's first layers add to the hidden states: their arguments and the checks of them."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

VISUAL = ("visual_pos_masks", "deepstack_visual_embeds")
"""Arguments of Qwen3-VL and similar models: the mask of visual tokens, and the features that each of the first layers adds."""

UNSPLIT = ("deepstack_features", "per_layer_inputs")
"""Arguments with values per token that sequence_parallel does not split. A model with one of them cannot take inputs_embeds."""


def reader_of(model: PreTrainedModel, names: tuple[str, ...]) -> PreTrainedModel | None:
    """Return the last (innermost) PreTrainedModel of ``model.modules()`` whose forward has an argument in ``names``, or None."""
    found = None
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not {*names}.isdisjoint(inspect.signature(module.forward).parameters):
            found = module
    return found


def check_visual(model: PreTrainedModel, call_arguments: dict[str, Any], shape: tuple[int, ...], cached: bool) -> None:
    """Raise ValueError if image features, which layers add, are missing beside inputs_embeds, unsupported or misshapen."""
    name, passed = type(model).__name__, [argument for argument in VISUAL if argument in call_arguments]
    if "inputs_embeds" not in call_arguments and not passed:
        return
    other = reader_of(model, UNSPLIT)
    if other is not None:
        raise ValueError(
            f"{name} adds more to its layers than inputs_embeds hold ({' or '.join(UNSPLIT)} of {type(other).__name__}), which "
            "sequence_parallel does not split: pass input_ids, and run batches with images unsharded"
        )
    if reader_of(model, VISUAL) is None:
        if passed:
            raise ValueError(f"{name} takes no {passed[0]}: leave it out")
        return
    mask, features = (call_arguments.get(argument) for argument in VISUAL)
    if "inputs_embeds" not in call_arguments or mask is None or features is None:
        raise ValueError(
            f"{name} adds features of images to the hidden states of its first layers, which inputs_embeds alone do not hold: "
            "pass inputs_embeds, visual_pos_masks [batch, length], True for tokens of images, and deepstack_visual_embeds, a "
            "list of [tokens of images, dim], together; for text alone an empty list and a mask of False"
        )
    if cached:
        raise ValueError(f"{name} got {VISUAL[0]} in a call with a cache, which knows text alone: leave use_cache out")
    if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
        raise ValueError(f"{VISUAL[0]} must be {list(shape)}, [batch, length] of the whole sequence, got {shape_of(mask)}")
    count, dim = int(mask.sum()), call_arguments["inputs_embeds"].shape[-1]
    for i, x in enumerate(features):
        if not isinstance(x, Tensor) or tuple(x.shape) != (count, dim):
            raise ValueError(f"{VISUAL[1]}[{i}] must be {[count, dim]}, a row for each True of {VISUAL[0]}, got {shape_of(x)}")


def shape_of(x: Any) -> list[int] | str:
    """Return the shape of a tensor, or the type name of another value, for an error."""
    return list(x.shape) if isinstance(x, Tensor) else type(x).__name__
