"""A call that continues a cache, as ``generate`` makes it: with a prompt, a chunk of one, or a few new tokens."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ring_attn_core.layouts import padded_local
from ring_attn_core.validation import in_words, is_integer

from ..data.layout import positions
from ..inference.decode import tree_attention_decode
from ..inference.forward import summed
from ..inference.prefill import prefill
from ..inference.step import DecodeStep
from ..ring.groups import rank_in
from .cache import RingCache, last_tokens
from .pattern import Pattern

FEW = 16
"""The maximum number of new tokens that every rank computes in full; more are sharded, as a prompt is."""


@dataclass
class CachedCall:
    """One model call with a cache.

    ``tokens``: the number of new tokens of each row, padding included. ``local``: the number of them that this rank computes,
    or None if each rank computes all. ``lengths``: the number of new tokens of each row without padding. ``valid``: bool
    [batch, tokens], False for padding, or None without padding. ``keep``: the number of last tokens whose logits are
    requested. ``longest``: the largest position id of all shards, or None if each rank computes all tokens.
    """

    cache: RingCache
    tokens: int
    local: int | None
    lengths: list[int]
    valid: Tensor | None
    keep: int
    device: torch.device
    longest: Tensor | None
    step: DecodeStep | None = None

    def seen(self, pattern: Pattern) -> CachedMask:
        """Return the mask of ``pattern`` in this call. Raise ValueError if it has chunks or is not causal."""
        if pattern.chunk or pattern.band.lo != 0:
            raise ValueError(
                "this layer sees chunks, or tokens after its own, and a cache on a ring knows causal attention, with a window or "
                'without: generate outside of sequence_parallel, after model.set_attn_implementation("sdpa")'
            )
        return CachedMask(self, pattern.band.hi)

    def begun(self, k: Tensor, v: Tensor) -> DecodeStep:
        """Return the cache's step for the new tokens, made from the first layer's k and v [batch, tokens, kv_heads, dim]."""
        if self.step is None:
            ring = self.cache.ring
            cache = self.cache.holding(k, v, self.tokens if self.local is None else self.local * ring.ranks)
            if self.local is None:
                self.step = cache.step(self.tokens, valid=self.valid)
            else:
                self.step = cache.prefill_step(self.local, ring.layout, self.lengths)
        return self.step

    def enter(self, model: PreTrainedModel, scope: ExitStack) -> None:
        """Allow updates of the cache while ``scope`` is open, and gather the hidden states of the last tokens for the logits."""
        self.cache.inside = True
        scope.callback(setattr, self.cache, "inside", False)
        if self.local is None:
            return

        def gather_last(_: nn.Module, __: Any, output: Any) -> Any:
            assert self.step is not None and self.cache.kv is not None
            mine = last_tokens(output[0], self.step.positions, self.step.lengths, self.keep)
            last = summed(mine, self.cache.kv)
            if isinstance(output, tuple):
                return (last, *output[1:])
            output["last_hidden_state"] = last
            return output

        scope.callback(model.base_model.register_forward_hook(gather_last).remove)

    def end(self) -> None:
        """Advance the cache by the new tokens."""
        assert self.step is not None and self.cache.kv is not None
        self.cache.kv.advance(self.step)
        self.cache.tokens += self.tokens


class CachedMask(NamedTuple):
    """The mask of layers of one kind: a token sees itself and up to ``window`` tokens before it, None: all."""

    turn: CachedCall
    window: int | None

    def attend(self, module: nn.Module, qkv: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]) -> Tensor:
        """Compute the attention of a layer [batch, tokens, heads, v_dim], and append its keys and values to the cache.

        ``qkv``: [batch, tokens, heads, dim] each; ``options``: scale, softcap and sinks.
        """
        q, k, v = qkv
        step, ring, layer = self.turn.begun(k, v), self.turn.cache.ring, int(module.layer_idx)  # type: ignore[arg-type]
        kv = self.turn.cache.kv
        assert kv is not None
        if step.layout is not None:
            at: dict[str, Any] = {"strategy": ring.strategy, "backend": ring.backend}
            return prefill(q, k, v, kv, layer, step, window=self.window, **options, **at)[0]
        kv.append(layer, k, v, step)
        backend = ring.backend if ring.backend in ("blockwise", "triton") else "auto"
        at = {"q_positions": step.positions, "group": ring.group, "backend": backend, **kv.part(layer, step)._asdict()}
        return tree_attention_decode(q, window=self.window, **options, **at)


def check_turn(cache: RingCache, given: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Raise ValueError if arguments of a call of ``shape`` [batch, tokens] do not continue the cache."""
    (batch, tokens), before = shape, cache.tokens
    mask, keep = given.get("attention_mask"), given.get("logits_to_keep", 1)
    if cache.kv is not None and cache.kv.spec.batch != batch:
        raise ValueError(f"the cache has {cache.kv.spec.batch} rows, and this call {batch}: begin without it")
    if mask is not None:
        if not isinstance(mask, Tensor) or tuple(mask.shape) != (batch, before + tokens):
            got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask must be {[batch, before + tokens]}, of {before} cached tokens and {tokens} new ones, got {got}"
            )
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
    types = given.get("token_type_ids")
    if isinstance(types, Tensor) and bool(types.any()):
        raise ValueError(
            "token_type_ids mark an image, whose tokens see one another, and a cache on a ring is of causal attention: "
            'generate outside of sequence_parallel, after model.set_attn_implementation("sdpa")'
        )


def turn_of(cache: RingCache, name: str, given: dict[str, Any], tokens: Tensor) -> tuple[CachedCall, dict[str, Any]]:
    """Return the turn of a call that has passed all checks, and this rank's arguments; ``name``: the cache's argument."""
    (batch, count), ring, before = tokens.shape[:2], cache.ring, cache.tokens
    keep, device = max(1, int(given.get("logits_to_keep", 1))), tokens.device
    position_ids = given.get("position_ids")
    if position_ids is None:
        position_ids = torch.arange(before, before + count, device=device)[None].expand(batch, -1)
    mask = given.get("attention_mask")
    present = None if mask is None else mask[:, -count:].to(device).bool()
    if present is not None and bool(present.all()):
        present = None
    lengths = [count] * batch if present is None else present.sum(1).tolist()
    kwargs = given | {name: cache, "use_cache": True}
    kwargs.pop("token_type_ids", None)
    tokens_name = "input_ids" if "input_ids" in given else "inputs_embeds"
    if before and (count <= FEW or keep > 1):
        turn = CachedCall(cache, count, None, lengths, present, keep, device, None)
        kwargs["attention_mask"] = torch.ones(batch, count, dtype=torch.bool, device=device)
        return turn, kwargs | {"position_ids": position_ids}
    local = padded_local(ring.layout, ring.ranks, count)
    own = positions(ring.layout, ring.ranks, count, rank_in(ring.group)).to(device).long()
    padding = 0 if present is None else (~present).sum(1, keepdim=True)
    index = (own + padding).clamp(max=count - 1).expand(batch, -1)  # moves the padding from left to right
    turn = CachedCall(cache, count, local, lengths, present, keep, device, position_ids.max())
    kwargs[tokens_name] = tokens.gather(1, index if tokens.ndim == 2 else index[..., None].expand(-1, -1, tokens.shape[2]))
    whole = position_ids.to(device).expand(*position_ids.shape[:-2], batch, count)
    kwargs["position_ids"] = whole.gather(-1, index.expand(*whole.shape[:-1], local))
    kwargs["attention_mask"] = torch.ones(batch, local, dtype=torch.bool, device=device)
    return turn, kwargs | {"logits_to_keep": keep}
