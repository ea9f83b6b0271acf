"""The argument checks of a model call inside ``sequence_parallel``, before the model runs, and of TrainingArguments.

If one rank refuses a call, every rank raises. At each call the ranks exchange what ``_description`` and ``_content`` return.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments

from ring_attn_core.data.trees import trees_of
from ring_attn_core.model.generation import check_ids
from ring_attn_core.validation import in_words, is_integer

from ..ring.agreement import exchange, same_error
from ..ring.groups import is_dtensor
from .cache import NAMES, cache_name, cache_of
from .documents import check_documents, check_positions, check_tree, shape_of
from .loss import check_routers
from .masks import NAME, CallArguments, CallRing
from .shards import IN_PLACE, LABELS, LENGTHS, SHARDED, SHIFTED, VISUAL, check_visual

OLDEST = Version("5.20")
"""The first release of transformers whose Trainer counts the labels of a row once, however many ranks shard it."""

REFUSED = {
    "output_attentions": "the weights of attention, tokens times tokens, are never made: for a short sequence call "
    'model.set_attn_implementation("eager") outside of it, or for one layer attend_block(q, k, v) with the identity as v',
    "logits_to_keep": "the last tokens are on one rank. Leave it out, or pass use_cache=True, for text",
    "is_causal": "the config says which tokens see which: leave it out",
}

SAME_WEIGHTS = "load equal weights on every rank, or call torch.manual_seed with one seed before you make model and adapters"
PAD_LEFT = "input_ids, attention_mask = (x.gather(1, attention_mask.argsort(stable=True)) for x in (input_ids, attention_mask))"

REFUSED_IN_TRAINING = {
    "n_gpu": "one process would drive several GPUs: start one a GPU, with torchrun",
    "average_tokens_across_devices": "every rank has a part of a row's labels, and only all of them count rightly: leave it True",
    "label_smoothing_factor": "its loss is made of whole logits: leave it 0",
    "neftune_noise_alpha": "its noise depends on the length of a row, of which every rank has a part: leave it out",
    "torch_compile": "it would compile the call that shards whole rows: leave it False, or compile in a loop of your own",
    "use_liger_kernel": "its loss is made in the model: leave it False, and pass loss_chunk",
    "deepspeed": "its engine divides gradients in its own way: use DDP or fsdp, version 2",
    "train_sampling_strategy": '"batch_rebalance" deals rows to ranks, not to rings: choose another',
    "dispatch_batches": "one rank would read all rows: leave it None in accelerator_config",
    "eval_use_gather_object": "rows of several rings are gathered as tensors, each once: leave it False",
    "loss_type": "SFTTrainer's other losses are made of what its own head returns: leave it "
    '"nll", or "chunked_nll", its old name',
    "precompute_ref_log_probs": "the reference model would run before the ring is on: leave it False",
}


def check_arguments(model: PreTrainedModel, ring: CallRing, args: tuple[object, ...], kwargs: dict[str, Any]) -> CallArguments:
    with same_error(ring.group):
        _check_attends(model)
        by_name = _by_name(model, args, kwargs)
        call = CallArguments(model, ring, by_name, _tokens(by_name))
        _check_ids(call)
        call = call._replace(cache=cache_of(call), seed=int(torch.randint(2**31, ())) if model.training else None)
        _check(call)
        described = by_name if call.cache is None else by_name | {"cached tokens": call.cache.tokens}
        mine = [_description(described), _content(by_name), call.seed]
    if ring.ranks > 1:
        exchanged = exchange("a call inside sequence_parallel", mine, ring.group)  # type: ignore[arg-type]
        _compare(exchanged)
        call = call._replace(seed=exchanged[0][2])
    return call


def check_weights(
    model: nn.Module, ring: CallRing, prefix: str = "", ranks: str = "the ring", remedy: str = SAME_WEIGHTS
) -> None:
    whole = {name: p.detach() for name, p in model.named_parameters() if not (is_dtensor(p) or p.is_meta)}
    if ring.ranks == 1 or not whole:
        return
    sums = [p.reshape(-1).view(torch.uint8).sum(dtype=torch.int64) for p in whole.values()]
    mine = dict(zip(whole, torch.stack([x.to(sums[0].device) for x in sums]).tolist(), strict=True))
    exchanged = exchange("sequence_parallel", mine, ring.group)  # type: ignore[arg-type]
    for rank, name in _differences(exchanged):
        raise ValueError(f"rank {rank} of {ranks} holds another {prefix}{name} than rank 0: {remedy}")


def _differences(by_rank: list[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    for rank, mine in enumerate(by_rank):
        yield from ((rank, name) for name in {**by_rank[0], **mine} if by_rank[0].get(name) != mine.get(name))


def _check_attends(model: PreTrainedModel) -> None:
    got = model.config.get_text_config()._attn_implementation
    if got != NAME:
        raise ValueError(
            f"model.config says attn_implementation={got!r} inside sequence_parallel, by which each rank would attend to its "
            "shard alone: call set_attn_implementation, and make other models of this config with another one, before you enter"
        )


def _by_name(model: PreTrainedModel, args: tuple[object, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that are not None, by name, with the cache under the name that ``model`` uses."""
    if len(args) > 1 or (args and "input_ids" in kwargs):
        raise ValueError(
            "inside sequence_parallel pass the arguments of the model by name; only input_ids may come first without"
        )
    named = kwargs | ({"input_ids": args[0]} if args else {})
    if all(named.get(name) is not None for name in NAMES):
        raise ValueError(f"the call has a cache and past_key_values, two names of one argument: pass {cache_name(model)} alone")
    return {cache_name(model) if name in NAMES else name: x for name, x in named.items() if x is not None}


def _tokens(call_arguments: dict[str, Any]) -> Tensor:
    if ("input_ids" in call_arguments) == ("inputs_embeds" in call_arguments):
        got = ", ".join(call_arguments) or "nothing"
        raise ValueError(f"the model takes either input_ids or inputs_embeds inside sequence_parallel, got {got}")
    name, dims = ("input_ids", 2) if "input_ids" in call_arguments else ("inputs_embeds", 3)
    x = call_arguments[name]
    if not isinstance(x, Tensor) or is_dtensor(x) or x.ndim != dims or not x.numel():
        dim = ", dim" if dims == 3 else ""
        raise ValueError(f"{name} must be a tensor [batch, length{dim}], whole, the same on every rank, got {shape_of(x)}")
    return x


def _check_ids(call: CallArguments) -> None:
    """Raise ValueError if the tokens are ids and one is outside the vocabulary: only the rank that has it would fail."""
    try:
        embedding, tokens = call.model.get_input_embeddings(), call.tokens
    except NotImplementedError:
        return
    more = hasattr(embedding, "num_additional_embeddings")  # Idefics has a second table for further ids
    if isinstance(embedding, nn.Embedding) and not more and not tokens.is_floating_point():
        check_ids([int(x) for x in tokens.aminmax()], embedding.num_embeddings, "input_ids hold")


def _check(call: CallArguments) -> None:
    model, (_, length), name, cached = call.model, call.shape, call.name, call.cache is not None
    if cached:
        _check_cached(call)
        cache_arguments = cache_name(model), "use_cache", "logits_to_keep"
        call = call._replace(by_name={argument: x for argument, x in call.by_name.items() if argument not in cache_arguments})
    given = call.by_name
    if {"labels", "shift_labels"} & given.keys() and model.loss_function not in (*SHIFTED, *IN_PLACE):
        raise ValueError(
            f"the loss of {name} is not a sum over tokens that sequence_parallel knows: leave labels out, compute it from logits "
            f"(gather_logits=True gives all {length}); its gradient is then as many times one device's as there are ranks"
        )
    _check_fused_head(call)
    check_routers(call)
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
        split = (*SHARDED, *LENGTHS, "num_items_in_batch", *VISUAL)
        if argument not in split and (isinstance(x, list | tuple | dict) or (isinstance(x, Tensor) and x.ndim)):
            raise ValueError(
                f"{name} got {argument} {shape_of(x)}, which sequence_parallel does not know how to split: it takes "
                f"{', '.join((*SHARDED, *LENGTHS[:1]))}. Images and sound go in as inputs_embeds with position_ids"
            )
    for argument in ("attention_mask", "token_type_ids", *LABELS)[cached:]:
        x = given.get(argument)
        if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) != call.shape):
            raise ValueError(
                f"{argument} must be {list(call.shape)}, [batch, length] of the whole sequence as input_ids is, got "
                f"{shape_of(x)}: sequence_parallel shards it, and shifts labels, itself; additive and 4-D masks "
                "do not say which tokens are padding"
            )
    check_visual(call)
    check_tree(call)
    check_positions(call)
    check_documents(call)
    if "shift_labels" in given and not {"labels", "tree"} & given.keys():
        raise ValueError("shift_labels came without labels: pass both, or labels alone, which are shifted here")


def _check_fused_head(call: CallArguments) -> None:
    if not call.by_name.get("fused_lm_head"):
        return
    who = f"{call.name} got fused_lm_head=True"
    if "fused_lm_head" not in getattr(getattr(call.model.forward, "__code__", None), "co_varnames", ()):
        raise ValueError(
            f"{who}, and has no head of trl: call trl's add_fused_lm_head(model), of trl.trainer.utils, before, or leave it out"
        )
    if not {"labels", "shift_labels"} & call.by_name.keys():
        raise ValueError(f"{who} without labels, whose log-probabilities it returns: pass them")
    for name in {"label_weights", "ignore_index"} & call.by_name.keys():
        raise ValueError(f"{who} and {name}, which trl's head does not take: leave it out")


def _description(call_arguments: dict[str, Any]) -> dict[str, Any]:
    plain = lambda x: x if isinstance(x, int | float | str | bool) else type(x).__name__
    return {name: [str(x.dtype), *x.shape] if isinstance(x, Tensor) else plain(x) for name, x in sorted(call_arguments.items())}


def _content(call_arguments: dict[str, Any]) -> dict[str, str]:
    """Return a digest of each tensor argument that is not floating point, of label_weights and of the tree."""
    exact = lambda x: x.double() if x.is_floating_point() else x  # numpy has no bfloat16
    digest = lambda content: blake2b(content, digest_size=16).hexdigest()
    digest_tensor = lambda x: digest(exact(x.detach()).cpu().numpy().tobytes())
    compared = lambda name, x: isinstance(x, Tensor) and (name == "label_weights" or not x.is_floating_point())
    tree = {"tree": digest(repr(trees_of(*call_arguments["tree"])).encode())} if "tree" in call_arguments else {}
    return tree | {name: digest_tensor(x) for name, x in sorted(call_arguments.items()) if compared(name, x)}


def _compare(exchanged: list[list[Any]]) -> None:
    """Raise ValueError if an argument differs between ranks. ``exchanged``: by rank [``_description``, ``_content``, seed]."""
    for part, what in ((0, "shape or value"), (1, "content")):
        by_rank = [parts[part] for parts in exchanged]
        for rank, name in _differences(by_rank):
            values = f": {by_rank[0].get(name)} on rank 0, {by_rank[rank].get(name)} on rank {rank}"
            raise ValueError(
                f"the ranks of this ring pass {name} of different {what} inside sequence_parallel"
                f"{f' on ranks 0 and {rank}' if part else values}. Every rank must "
                "pass the same whole batch: ranks of a ring read the same data, ranks of other rings other data. Where "
                "generate() draws tokens, call torch.manual_seed with the same seed on every rank first"
            )


def _check_cached(call: CallArguments) -> None:
    (batch, tokens), cache, given = call.shape, call.cache, call.by_name
    before, mask, keep = cache.tokens, given.get("attention_mask"), given.get("logits_to_keep", 1)
    if cache.kv is not None and cache.kv.spec.batch != batch:
        raise ValueError(f"the cache has {cache.kv.spec.batch} rows, and this call {batch}: begin without it")
    if mask is not None:
        if not isinstance(mask, Tensor) or tuple(mask.shape) != (batch, before + tokens):
            expected = f"{[batch, before + tokens]}, of {before} cached tokens and {tokens} new ones"
            raise ValueError(f"attention_mask must be {expected}, got {shape_of(mask)}")
        if bool((mask[:, 1:].bool() < mask[:, :-1].bool()).any()):
            raise ValueError(
                "attention_mask has padding after a token, and a cache on a ring has none. Where none was passed generate() made "
                f"it of pad_token_id: pass attention_mask. To pad on the left, as generate() wants: {PAD_LEFT}"
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
    types = given.get("token_type_ids")
    if isinstance(types, Tensor) and bool(types.any()):
        raise ValueError(
            "token_type_ids mark an image, whose tokens see one another, and a cache on a ring is of causal attention: "
            'generate outside of sequence_parallel, after model.set_attn_implementation("sdpa")'
        )


def check_training_arguments(args: TrainingArguments) -> None:
    if Version(transformers.__version__) < OLDEST:
        raise ValueError(
            f"RingTrainer needs transformers {OLDEST} or newer, whose Trainer counts the labels of a row that ranks share once, "
            f"and this is {transformers.__version__}: update it, or call the model inside sequence_parallel in a loop of your own"
        )
    if dist.is_initialized() and dist.get_world_size() != args.world_size:
        raise ValueError(
            f"the process group has {dist.get_world_size()} ranks, and TrainingArguments knows of {args.world_size}: start with "
            "torchrun, and without GPUs pass use_cpu=True"
        )
    rows, loss_type = args.accelerator_config, getattr(args, "loss_type", None)
    is_set = {
        "n_gpu": args.n_gpu > 1,
        "average_tokens_across_devices": args.world_size > 1 and not args.average_tokens_across_devices,
        "neftune_noise_alpha": args.neftune_noise_alpha is not None,
        "train_sampling_strategy": args.train_sampling_strategy == "batch_rebalance",
        "dispatch_batches": bool(rows.dispatch_batches),  # type: ignore[union-attr]
        "loss_type": isinstance(loss_type, str) and loss_type != "nll",  # DPOTrainer's are a list
    }
    for name, why in REFUSED_IN_TRAINING.items():
        value = getattr(args, name, None)
        if is_set.get(name, bool(value)):
            raise ValueError(f"a Trainer on a ring cannot honour {name}={True if value is None else value}: {why}")
