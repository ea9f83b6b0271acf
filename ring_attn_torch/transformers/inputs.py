"""This rank's shards of a call's global sequences, checked on all ranks before anything is sent."""

from __future__ import annotations

import inspect
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification

from ..ring.agreement import same_error, tell
from ..ring.groups import is_dtensor
from .cache import RingCache, cache_name, cache_of, with_cache_renamed
from .cached_call import CachedCall, check_turn, turn_of
from .deepstack import VISUAL, check_visual, reader_of, shards_of_features
from .global_batch import GlobalBatch, ModelRing, documents_of, ends_of_blocks
from .masks import NAME
from .models import own_positions, text_config

SHIFTED, IN_PLACE = (ForCausalLMLoss,), (ForMaskedLMLoss, ForTokenClassification)
"""Losses of transformers that are sums over tokens: of the next token, and of the token itself."""

IMAGE_BLOCKS = {"gemma3", "gemma3_text"}
"""Models, by config.model_type, whose token_type_ids of 1 mark the tokens of an image, which see one another."""

REFUSED = {
    "output_attentions": "the weights of attention, tokens times tokens, are never made: leave it out",
    "output_router_logits": "the routers' loss is no sum over tokens: leave it out",
    "logits_to_keep": "the last tokens are on one rank. Leave it out, or pass use_cache=True, for text",
    "fused_lm_head": "trl's own head would make the loss of a shard: let Trainer.compute_loss compute it, not SFTTrainer's",
    "is_causal": "the config says who sees whom: leave it out",
}
KEPT = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels", "token_type_ids")
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments added by collators of packed documents.

seq_idx is not read: it is for short convolutions, which a ring does not support.
"""


class Shards(NamedTuple):
    """This rank's part of one model call: its arguments and labels, and the global batch or cached call that it belongs to.

    ``count``: the call's num_items_in_batch, or None.
    """

    whole: GlobalBatch | CachedCall
    kwargs: dict[str, Any]
    labels: Tensor | None = None
    count: Any = None
    ignore_index: int = -100
    features: dict[str, Any] | None = None
    """Image features for a part of the model to which the model itself does not pass them."""


def sharded(model: PreTrainedModel, ring: ModelRing, args: tuple[object, ...], kwargs: dict[str, Any]) -> Shards:
    """Return this rank's shards of a call with global sequences.

    Raise ValueError, the same on every rank, if the call cannot be split.
    """
    with same_error(ring.group):
        _check_attends(model)
        given = with_cache_renamed(model, _by_name(args, kwargs))
        tokens = _tokens(given)
        cache = cache_of(model, ring, given)
        keeps = () if cache is None else (cache_name(model), "use_cache", "logits_to_keep")
        _check(model, {name: x for name, x in given.items() if name not in keeps}, tuple(tokens.shape[:2]), cache)
        said = given if cache is None else given | {"cached tokens": cache.tokens}
        mine: list[Any] = [_said(said), _content(given)]
        mine.append(int(torch.randint(2**31, ())) if model.training else None)
    seed = mine[2]
    if ring.ranks > 1:
        told = tell("a call inside sequence_parallel", mine, ring.group)  # type: ignore[arg-type]
        _compare(told)
        seed = told[0][2]
    if cache is not None:
        return Shards(*turn_of(cache, cache_name(model), given, tokens))
    return _shards(model, ring, given, tokens, seed)


def _check_attends(model: PreTrainedModel) -> None:
    """Raise ValueError if the config was set to another attention since sequence_parallel was entered."""
    got = text_config(model.config)._attn_implementation
    if got != NAME:
        raise ValueError(
            f"model.config says attn_implementation={got!r} inside sequence_parallel, by which each rank would attend to its "
            "shard alone: call set_attn_implementation, and make other models of this config with another one, before you enter"
        )


def _by_name(args: tuple[object, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that are not None, by name."""
    if len(args) > 1 or (args and "input_ids" in kwargs):
        raise ValueError(
            "inside sequence_parallel pass the arguments of the model by name; only input_ids may come first without"
        )
    given = dict(kwargs) | ({"input_ids": args[0]} if args else {})
    return {name: x for name, x in given.items() if x is not None}


def _tokens(given: dict[str, Any]) -> Tensor:
    """Return the tensor that gives the number of tokens: input_ids or inputs_embeds."""
    if ("input_ids" in given) == ("inputs_embeds" in given):
        raise ValueError(
            "the model takes either input_ids or inputs_embeds inside sequence_parallel, got " + (", ".join(given) or "nothing")
        )
    name, dims = ("input_ids", 2) if "input_ids" in given else ("inputs_embeds", 3)
    x = given[name]
    if not isinstance(x, Tensor) or is_dtensor(x) or x.ndim != dims or not x.numel():
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"{name} must be a tensor [batch, length{', dim' if dims == 3 else ''}], whole, the same on every rank, got {got}"
        )
    return x


def _check(model: PreTrainedModel, given: dict[str, Any], shape: tuple[int, ...], cache: RingCache | None) -> None:
    """Raise ValueError if an argument cannot be split, or is not of ``shape`` [batch, length]."""
    name, length = type(model).__name__, shape[1]
    if "labels" in given and model.loss_function not in (*SHIFTED, *IN_PLACE):
        raise ValueError(
            f"the loss of {name} is no sum over tokens that sequence_parallel knows: leave labels out, compute it from logits "
            f"(gather_logits=True gives all {length}); its gradient is then as many times one device's as there are ranks"
        )
    if "logits_to_keep" in given and given.get("use_cache") is False:
        raise ValueError(
            f"{name} got use_cache=False and logits_to_keep inside sequence_parallel, as generate(use_cache=False) passes them, "
            "which would read the whole text again for every token. Call generate(..., use_cache=True), whose cache the ring "
            'shares; without a cache generate outside of sequence_parallel, after model.set_attn_implementation("sdpa"). In a '
            "call of your own leave logits_to_keep out"
        )
    for argument, x in given.items():
        empty = (isinstance(x, bool | int) and not x) and argument != "is_causal"
        if argument in REFUSED and not empty:
            raise ValueError(f"{name} got {argument} inside sequence_parallel: {REFUSED[argument]}")
        split = (*KEPT, *LENGTHS, "num_items_in_batch", *VISUAL)
        if argument not in split and (isinstance(x, list | tuple | dict) or (isinstance(x, Tensor) and x.ndim)):
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{name} got {argument} {got}, which sequence_parallel does not know how to split: it takes "
                f"{', '.join((*KEPT, *LENGTHS[:1]))}. Images and sound go in as inputs_embeds with position_ids"
            )
    if cache is not None:
        check_turn(cache, given, shape)
    for argument in ("attention_mask", "labels", "shift_labels", "token_type_ids")[cache is not None :]:
        x = given.get(argument)
        if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) != shape):
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{argument} must be {list(shape)}, [batch, length] of the whole sequence as input_ids is, got {got}: "
                "sequence_parallel shards it, and shifts labels, itself; additive and 4-D masks are no padding"
            )
    check_visual(model, given, shape, cache is not None)
    _check_positions(model, given, shape)
    if "seq_idx" in given and not {"position_ids", "cu_seq_lens_q"} & given.keys():
        raise ValueError(
            f"{name} got seq_idx alone, which no attention reads: pass packed documents as position_ids that begin again"
        )
    if "cu_seq_lens_q" in given and shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q is for a batch of one row, got {shape[0]}: pass position_ids that begin again")
    if "shift_labels" in given and "labels" not in given:
        raise ValueError("shift_labels came without labels: pass both, or labels alone, which are shifted here")


def _check_positions(model: PreTrainedModel, given: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Raise ValueError if position_ids are missing although required, or are not those of the global sequence."""
    name, (batch, length), x = type(model).__name__, shape, given.get("position_ids")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{name}.forward takes no position_ids, so each rank would count its shard from 0: it does not run over a ring"
        )
    if x is None:
        if not own_positions(model):
            raise ValueError(
                f"{name} has no rotary embedding, and learned positions start and skip padding in ways of their own: pass "
                f"position_ids [batch, {length}], whole, as it would make them"
            )
        return
    good = isinstance(x, Tensor) and x.ndim in (2, 3) and x.shape[-1] == length and x.shape[-2] in (1, batch)
    if not good or (x.ndim == 3 and x.shape[0] not in (3, 4)):
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"position_ids must be [1 or {batch}, {length}], or [3 or 4, {batch}, {length}] for Qwen-VL, of the whole sequence, "
            f"got {got}: sequence_parallel shards them itself"
        )


def _said(given: dict[str, Any]) -> list[Any]:
    """Return names, shapes and plain values of a call, which ranks compare."""
    plain = lambda x: x if isinstance(x, int | float | str | bool) else type(x).__name__
    kinds = {n: [str(x.dtype), *x.shape] if isinstance(x, Tensor) else plain(x) for n, x in given.items()}
    return [[name, kinds[name]] for name in sorted(kinds)]


def _content(given: dict[str, Any]) -> list[list[str]]:
    """Return a digest of every integer tensor of a call."""
    whole = {n: x for n, x in sorted(given.items()) if isinstance(x, Tensor) and not x.is_floating_point()}
    digest = lambda x: blake2b(x.detach().contiguous().cpu().numpy().tobytes(), digest_size=16).hexdigest()
    return [[name, digest(x)] for name, x in whole.items()]


def _compare(told: list[list[Any]]) -> None:
    """Raise ValueError if ranks pass an argument differently, and name it."""
    for part, what in ((0, "shape or value"), (1, "content")):
        first = dict(told[0][part])
        for rank, theirs in enumerate(told):
            other = dict(theirs[part])
            for name in dict.fromkeys([*first, *other]):
                if first.get(name) != other.get(name):
                    got = (
                        f": {first.get(name)} on rank 0, {other.get(name)} on rank {rank}"
                        if not part
                        else f" on ranks 0 and {rank}"
                    )
                    raise ValueError(
                        f"the ranks of this ring pass {name} of different {what} inside sequence_parallel{got}. Every rank must "
                        "pass the same whole batch: ranks of a ring read the same data, ranks of other rings other data. Where "
                        "generate() draws tokens, call torch.manual_seed with the same seed on every rank first"
                    )


def _shards(model: PreTrainedModel, ring: ModelRing, given: dict[str, Any], tokens: Tensor, seed: int | None) -> Shards:
    """Return the shards of a call that has passed all checks."""
    batch, length = tokens.shape[:2]
    move = lambda name: given[name].to(tokens.device) if name in given else None
    position_ids, present, types = move("position_ids"), move("attention_mask"), move("token_type_ids")
    text = position_ids
    if position_ids is not None and position_ids.ndim == 3:
        text = position_ids[0] if position_ids.shape[0] == 4 else None
    present = None if present is None else present.bool()
    text = None if text is None else text.expand(batch, -1)
    documents = documents_of(text, present, move("cu_seq_lens_q"), length)
    blocks = None
    if types is not None and model.config.model_type in IMAGE_BLOCKS:
        blocks, types = ends_of_blocks(types == 1), None
    if position_ids is None:
        position_ids = torch.arange(length, device=tokens.device)[None].expand(batch, -1)
    whole = GlobalBatch(ring, batch, length, tokens.device, documents, blocks, seed, position_ids.max())
    left_out = {*KEPT, *LENGTHS, *VISUAL, "num_items_in_batch", "ignore_index", "use_cache"}
    kwargs: dict[str, Any] = {name: x for name, x in given.items() if name not in left_out}
    name = "input_ids" if "input_ids" in given else "inputs_embeds"
    kwargs[name] = whole.shard(tokens)
    kwargs["position_ids"] = whole.shard(position_ids, -1)
    kwargs["attention_mask"] = torch.ones(batch, len(whole.index), dtype=torch.bool, device=tokens.device)
    parameters = inspect.signature(model.forward).parameters
    if "use_cache" in parameters:
        kwargs["use_cache"] = False
    if types is not None:
        kwargs["token_type_ids"] = whole.shard(types)
    features = shards_of_features(whole, given) if VISUAL[0] in given else None
    if features is not None and reader_of(model, VISUAL) is model:
        kwargs, features = kwargs | features, None
    if "labels" not in given:
        return Shards(whole, kwargs, features=features)
    ignore_index = given.get("ignore_index", -100)
    labels = given.get("shift_labels", given["labels"]).to(tokens.device)
    if model.loss_function in SHIFTED and "shift_labels" not in given:
        labels = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
    count = given.get("num_items_in_batch")
    return Shards(whole, kwargs, whole.filled(labels, ignore_index), count, ignore_index, features)
