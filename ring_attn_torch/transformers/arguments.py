"""The argument checks of a model call inside ``sequence_parallel``: on each rank, then between ranks, before the model runs.

If one rank refuses a call, every rank raises. At every call, the ranks exchange the names of the passed arguments, the dtypes and
shapes of tensors, and the plain values (numbers, bools, text). They also exchange digests of label_weights, of the tree and of
tensors that are not floating point. If any of these differ, the error names the argument.
"""

from __future__ import annotations

import inspect
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification

from ring_attn_core.data.trees import trees_of
from ring_attn_core.model.generation import check_ids
from ring_attn_core.validation import in_words, is_integer

from ..ring.agreement import exchange, same_error
from ..ring.groups import is_dtensor
from .cache import RingCache, cache_name, cache_of, with_cache_renamed
from .documents import check_documents
from .masks import NAME, CallRing
from .models import own_positions, text_config
from .routers import check_routers
from .trees import check_tree
from .trl import check_call
from .visual import VISUAL, check_visual, shape_of

SHIFTED, IN_PLACE = (ForCausalLMLoss,), (ForMaskedLMLoss, ForTokenClassification)
"""transformers' losses that are sums over tokens. SHIFTED: a token predicts the next token's label; IN_PLACE: its own label."""

REFUSED = {
    "output_attentions": "the weights of attention, tokens times tokens, are never made: leave it out",
    "logits_to_keep": "the last tokens are on one rank. Leave it out, or pass use_cache=True, for text",
    "is_causal": "the config says who sees whom: leave it out",
}
LABELS = ("labels", "shift_labels", "label_weights")
SHARDED = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", *LABELS, "tree")
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments added by collators of packed documents.

seq_idx is not read: it is for short convolutions, which a ring does not support.
"""


class CheckedArguments(NamedTuple):
    """A call's checked arguments. ``by_name``: those that are not None. ``tokens``: ids or embeddings. ``seed``: for dropout."""

    by_name: dict[str, Any]
    tokens: Tensor
    cache: RingCache | None
    seed: int | None


def checked_arguments(
    model: PreTrainedModel, ring: CallRing, args: tuple[object, ...], kwargs: dict[str, Any]
) -> CheckedArguments:
    """Return a call's checked arguments. Raise ValueError on all ranks if an argument is unsupported or differs between ranks."""
    with same_error(ring.group):
        _check_attends(model)
        call_arguments = with_cache_renamed(model, _by_name(args, kwargs))
        tokens = _tokens(call_arguments)
        _check_ids(model, tokens)
        cache = cache_of(model, ring, call_arguments)
        of_cache = () if cache is None else (cache_name(model), "use_cache", "logits_to_keep")
        _check(model, {name: x for name, x in call_arguments.items() if name not in of_cache}, tuple(tokens.shape[:2]), cache)
        described = call_arguments if cache is None else call_arguments | {"cached tokens": cache.tokens}
        seed = int(torch.randint(2**31, ())) if model.training else None
        mine = [_description(described), _content(call_arguments), seed]
    if ring.ranks > 1:
        exchanged = exchange("a call inside sequence_parallel", mine, ring.group)  # type: ignore[arg-type]
        _compare(exchanged)
        seed = exchanged[0][2]
    return CheckedArguments(call_arguments, tokens, cache, seed)


SAME_WEIGHTS = (
    "load the same weights on every rank, or call torch.manual_seed with one seed before the model, and adapters as LoRA, are "
    "made"
)


def check_weights(
    model: nn.Module, ring: CallRing, prefix: str = "", ranks: str = "the ring", remedy: str = SAME_WEIGHTS
) -> None:
    """Raise ValueError if the byte sum of an unsharded weight differs between ranks. The texts are for the error."""
    whole = {name: p.detach() for name, p in model.named_parameters() if not (is_dtensor(p) or p.is_meta)}
    if ring.ranks == 1 or not whole:
        return
    of_bytes = [p.reshape(-1).view(torch.uint8).sum(dtype=torch.int64) for p in whole.values()]
    mine = dict(zip(whole, torch.stack([x.to(of_bytes[0].device) for x in of_bytes]).tolist(), strict=True))
    exchanged = exchange("sequence_parallel", mine, ring.group)  # type: ignore[arg-type]
    for rank, theirs in enumerate(exchanged):
        other = next((name for name in {**exchanged[0], **theirs} if exchanged[0].get(name) != theirs.get(name)), None)
        if other is not None:
            raise ValueError(f"rank {rank} of {ranks} holds another {prefix}{other} than rank 0: {remedy}")


def _check_attends(model: PreTrainedModel) -> None:
    """Raise ValueError if the config's attention implementation was changed inside sequence_parallel."""
    got = text_config(model.config)._attn_implementation
    if got != NAME:
        raise ValueError(
            f"model.config says attn_implementation={got!r} inside sequence_parallel, by which each rank would attend to its "
            "shard alone: call set_attn_implementation, and make other models of this config with another one, before you enter"
        )


def _by_name(args: tuple[object, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that are not None, by name. Raise ValueError if any but input_ids is positional."""
    if len(args) > 1 or (args and "input_ids" in kwargs):
        raise ValueError(
            "inside sequence_parallel pass the arguments of the model by name; only input_ids may come first without"
        )
    call_arguments = dict(kwargs) | ({"input_ids": args[0]} if args else {})
    return {name: x for name, x in call_arguments.items() if x is not None}


def _tokens(call_arguments: dict[str, Any]) -> Tensor:
    """Return input_ids or inputs_embeds. Raise ValueError unless exactly one is passed, as a plain Tensor, not a DTensor."""
    if ("input_ids" in call_arguments) == ("inputs_embeds" in call_arguments):
        raise ValueError(
            "the model takes either input_ids or inputs_embeds inside sequence_parallel, got "
            + (", ".join(call_arguments) or "nothing")
        )
    name, dims = ("input_ids", 2) if "input_ids" in call_arguments else ("inputs_embeds", 3)
    x = call_arguments[name]
    if not isinstance(x, Tensor) or is_dtensor(x) or x.ndim != dims or not x.numel():
        dim = ", dim" if dims == 3 else ""
        raise ValueError(f"{name} must be a tensor [batch, length{dim}], whole, the same on every rank, got {shape_of(x)}")
    return x


def _check_ids(model: PreTrainedModel, tokens: Tensor) -> None:
    """Raise ValueError if ``tokens`` are ids and one is outside the vocabulary: only the rank that has it would fail."""
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        return
    more = hasattr(embedding, "num_additional_embeddings")  # Idefics has a second table for further ids
    if isinstance(embedding, nn.Embedding) and not more and not tokens.is_floating_point():
        check_ids([int(x) for x in tokens.aminmax()], embedding.num_embeddings, "input_ids hold")


def _check(model: PreTrainedModel, call_arguments: dict[str, Any], shape: tuple[int, ...], cache: RingCache | None) -> None:
    """Raise ValueError if arguments cannot be sharded, do not match ``shape`` [batch, length], or need an unsupported loss."""
    name, length = type(model).__name__, shape[1]
    if {"labels", "shift_labels"} & call_arguments.keys() and model.loss_function not in (*SHIFTED, *IN_PLACE):
        raise ValueError(
            f"the loss of {name} is no sum over tokens that sequence_parallel knows: leave labels out, compute it from logits "
            f"(gather_logits=True gives all {length}); its gradient is then as many times one device's as there are ranks"
        )
    check_call(model, call_arguments)
    check_routers(model, call_arguments, cache is not None)
    if "logits_to_keep" in call_arguments and call_arguments.get("use_cache") is False:
        raise ValueError(
            f"{name} got use_cache=False and logits_to_keep inside sequence_parallel, as generate(use_cache=False) passes them, "
            "which would read the whole text again for every token. Call generate(..., use_cache=True), whose cache the ring "
            'shares; without a cache generate outside of sequence_parallel, after model.set_attn_implementation("sdpa"). In a '
            "call of your own leave logits_to_keep out"
        )
    for argument, x in call_arguments.items():
        empty = (isinstance(x, bool | int) and not x) and argument != "is_causal"
        if argument in REFUSED and not empty:
            raise ValueError(f"{name} got {argument} inside sequence_parallel: {REFUSED[argument]}")
        split = (*SHARDED, *LENGTHS, "num_items_in_batch", *VISUAL)
        if argument not in split and (isinstance(x, list | tuple | dict) or (isinstance(x, Tensor) and x.ndim)):
            raise ValueError(
                f"{name} got {argument} {shape_of(x)}, which sequence_parallel does not know how to split: it takes "
                f"{', '.join((*SHARDED, *LENGTHS[:1]))}. Images and sound go in as inputs_embeds with position_ids"
            )
    if cache is not None:
        _check_cached(cache, call_arguments, shape)
    for argument in ("attention_mask", "token_type_ids", *LABELS)[cache is not None :]:
        x = call_arguments.get(argument)
        if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) != shape):
            raise ValueError(
                f"{argument} must be {list(shape)}, [batch, length] of the whole sequence as input_ids is, got {shape_of(x)}: "
                "sequence_parallel shards it, and shifts labels, itself; additive and 4-D masks are no padding"
            )
    check_visual(model, call_arguments, shape, cache is not None)
    check_tree(model, call_arguments, shape, cache is not None)
    _check_positions(model, call_arguments, shape)
    check_documents(name, call_arguments, shape, cache is not None)
    if "shift_labels" in call_arguments and not {"labels", "tree"} & call_arguments.keys():
        raise ValueError("shift_labels came without labels: pass both, or labels alone, which are shifted here")


def _check_positions(model: PreTrainedModel, call_arguments: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Raise ValueError if the model takes no position_ids, if required position_ids are missing, or if their shape is wrong."""
    name, (batch, length), x = type(model).__name__, shape, call_arguments.get("position_ids")
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
        raise ValueError(
            f"position_ids must be [1 or {batch}, {length}], or [3 or 4, {batch}, {length}] for Qwen-VL, of the whole sequence, "
            f"got {shape_of(x)}: sequence_parallel shards them itself"
        )


def _description(call_arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the dtype and shape of each tensor argument, plain values themselves, and the type names of other values."""
    plain = lambda x: x if isinstance(x, int | float | str | bool) else type(x).__name__
    return {name: [str(x.dtype), *x.shape] if isinstance(x, Tensor) else plain(x) for name, x in sorted(call_arguments.items())}


def _content(call_arguments: dict[str, Any]) -> dict[str, str]:
    """Return a digest of each tensor argument that is not floating point, of label_weights and of the tree."""
    exact = lambda x: x.double() if x.is_floating_point() else x  # numpy has no bfloat16
    digest = lambda x: blake2b(exact(x.detach()).cpu().numpy().tobytes(), digest_size=16).hexdigest()
    compared = lambda name, x: isinstance(x, Tensor) and (name == "label_weights" or not x.is_floating_point())
    tree = {}
    if "tree" in call_arguments:
        tree["tree"] = blake2b(repr(trees_of(*call_arguments["tree"])).encode(), digest_size=16).hexdigest()
    return tree | {name: digest(x) for name, x in sorted(call_arguments.items()) if compared(name, x)}


def _compare(exchanged: list[list[Any]]) -> None:
    """Raise ValueError if an argument differs between ranks. ``exchanged``: by rank [``_description``, ``_content``, seed]."""
    for part, what in ((0, "shape or value"), (1, "content")):
        first = exchanged[0][part]
        for rank, (*parts, _) in enumerate(exchanged):
            other = parts[part]
            name = next((name for name in {**first, **other} if first.get(name) != other.get(name)), None)
            if name is None:
                continue
            values = f": {first.get(name)} on rank 0, {other.get(name)} on rank {rank}"
            raise ValueError(
                f"the ranks of this ring pass {name} of different {what} inside sequence_parallel"
                f"{f' on ranks 0 and {rank}' if part else values}. Every rank must "
                "pass the same whole batch: ranks of a ring read the same data, ranks of other rings other data. Where "
                "generate() draws tokens, call torch.manual_seed with the same seed on every rank first"
            )


def _check_cached(cache: RingCache, call_arguments: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Raise ValueError if the arguments of a call of ``shape`` [batch, tokens] do not continue the cache."""
    (batch, tokens), before = shape, cache.tokens
    mask, keep = call_arguments.get("attention_mask"), call_arguments.get("logits_to_keep", 1)
    if cache.kv is not None and cache.kv.spec.batch != batch:
        raise ValueError(f"the cache has {cache.kv.spec.batch} rows, and this call {batch}: begin without it")
    if mask is not None:
        if not isinstance(mask, Tensor) or tuple(mask.shape) != (batch, before + tokens):
            expected = f"{[batch, before + tokens]}, of {before} cached tokens and {tokens} new ones"
            raise ValueError(f"attention_mask must be {expected}, got {shape_of(mask)}")
        if bool((mask[:, 1:].bool() < mask[:, :-1].bool()).any()):
            raise ValueError(
                "attention_mask has padding after a token, and a cache on a ring has none: pad on the left, as generate() wants "
                '(tokenizer.padding_side = "left"). Where none was passed generate() made it of pad_token_id: pass attention_mask'
            )
        said, held = mask[:, :before].sum(1).tolist(), [] if cache.kv is None else cache.kv.lengths.tolist()
        for row, (tokens_said, tokens_held) in enumerate(zip(said, held, strict=False)):
            if tokens_said != tokens_held:
                raise ValueError(
                    f"attention_mask leaves {tokens_said} of the {before} earlier tokens of row {row}, and its cache holds "
                    f"{tokens_held}: cached tokens cannot be hidden: pass the mask of the calls before, and ones for new tokens"
                )
    if not is_integer(keep):
        raise ValueError(f"logits_to_keep must be an int, the last tokens whose logits are wanted, got {in_words(keep)}")
    types = call_arguments.get("token_type_ids")
    if isinstance(types, Tensor) and bool(types.any()):
        raise ValueError(
            "token_type_ids mark an image, whose tokens see one another, and a cache on a ring is of causal attention: "
            'generate outside of sequence_parallel, after model.set_attn_implementation("sdpa")'
        )
