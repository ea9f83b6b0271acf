"""Random calls of torch.nn.MultiheadAttention: drawn, computed by torch's own and by the one over a ring."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn_torch import MultiheadAttention, from_layout, sum_gradients, to_layout

Group = dist.ProcessGroup | None
Tensors = dict[str, Tensor]

MASKS = "none", "causal", "hint", "window", "documents", "keys", "causal keys", "per row", "bias", "heads", "holes"
REFUSED = {"bias": "attn_mask adds numbers", "heads": "differs between heads", "holes": "neither a band .* nor one interval"}


@dataclass
class Draw:
    """A module, a call of it with whole tensors, and the words in which it is refused, if it is."""

    made: dict[str, Any]
    query: Tensor
    key: Tensor
    value: Tensor
    called: dict[str, Any]
    layout: str
    refused: str | None = None
    lengths: dict[str, int] = field(default_factory=dict)

    @property
    def dim(self) -> int:
        """Return the dimension of inputs and outputs that counts tokens."""
        return 1 if self.query.ndim == 3 and self.made["batch_first"] else 0

    def module(self, kind: Callable[..., nn.Module] = nn.MultiheadAttention) -> Any:
        torch.manual_seed(3)
        module = kind(**self.made, dtype=torch.float64)
        for p in module.parameters():
            nn.init.normal_(p, std=0.5)
        return module

    def cotangent(self) -> Tensor:
        return torch.randn(self.query.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def draw(seed: int) -> Draw:
    """One of many calls. Every query sees a key, for torch makes NaN of those that see none."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, head_dim, batch, queries = rng.choice([1, 2, 3]), rng.choice([2, 4, 5]), rng.choice([1, 2, 3]), rng.randint(1, 21)
    unbatched, cross = rng.random() < 0.2, rng.random() < 0.5
    batch = 1 if unbatched else batch
    keys = rng.randint(1, 25) if cross else queries
    made = {"embed_dim": heads * head_dim, "num_heads": heads, "bias": rng.random() < 0.7, "batch_first": rng.random() < 0.5}
    made |= {"add_bias_kv": rng.random() < 0.25, "add_zero_attn": rng.random() < 0.25, "dropout": rng.choice([0.0, 0.3])}
    sizes = [heads * head_dim, *([rng.choice([7, 11]), rng.choice([4, 7])] if cross and rng.random() < 0.5 else [None] * 2)]
    made |= {"kdim": sizes[1], "vdim": sizes[2]}

    def inputs(tokens: int, size: int | None) -> Tensor:
        x = torch.randn(batch, tokens, size or heads * head_dim, generator=generator, dtype=torch.float64)
        return x[0] if unbatched else x if made["batch_first"] else x.transpose(0, 1).contiguous()

    query = inputs(queries, None)
    key, value = (inputs(keys, size) for size in sizes[1:]) if cross else (query, query)
    kind = MASKS[-1 - seed // 8 % 3] if seed % 8 == 7 else rng.choice(MASKS[:-3])
    if kind in ("heads", "holes") and (heads == 1 or queries == 1 or keys < 3):
        kind = "none"
    visible = _visible(kind, rng, generator, (batch, heads, queries, keys))
    present = torch.rand(batch, keys, generator=generator) < 0.7
    padded = rng.random() < 0.5 and bool((present[:, None, None] & visible).any(-1).all())
    additive = kind == "bias" or rng.random() < 0.5
    called: dict[str, Any] = rng.choice([{}, {"need_weights": False}, {"need_weights": False, "average_attn_weights": False}])
    if kind != "none":
        whole = visible[:, :1].expand(-1, heads, -1, -1) if kind != "heads" else visible
        mask = visible[0, 0] if kind not in ("per row", "heads") else whole.reshape(batch * heads, queries, keys)
        called["attn_mask"] = _written(mask, additive)
        if kind == "bias":
            called["attn_mask"] = called["attn_mask"] + torch.randn(queries, keys, generator=generator, dtype=torch.float64)
    called |= {"is_causal": True} if kind == "hint" else {}
    called |= {"key_padding_mask": _written(present[0] if unbatched else present, additive)} if padded else {}
    refused = REFUSED.get(kind)
    if refused is None and rng.random() < 0.1:
        called["need_weights"], refused = True, "need_weights=True"
    lengths = {} if kind != "none" and rng.random() < 0.5 else {"length": queries, "kv_length": keys}
    return Draw(made, query, key, value, called, rng.choice(["contiguous", "striped", "zigzag"]), refused, lengths)


def _visible(kind: str, rng: random.Random, generator: torch.Generator, shape: tuple[int, int, int, int]) -> Tensor:
    """bool [batch, heads, queries, keys]: who sees whom."""
    batch, heads, queries, keys = shape
    lag, every = torch.arange(queries)[:, None] - torch.arange(keys), torch.ones(shape, dtype=torch.bool)
    if kind in ("causal", "hint"):
        return every & (lag >= 0)
    if kind in ("window", "bias"):
        return every & (lag <= rng.randint(max(queries - keys, 0), queries)) & (lag >= -rng.randint(0, keys))
    if kind == "documents":
        cut = rng.randint(0, min(queries, keys) - 1)
        return every & ((torch.arange(queries)[:, None] < cut) == (torch.arange(keys) < cut))
    hidden = torch.rand(batch, 1, 1, keys, generator=generator) < 0.4
    hidden[..., 0] = False
    if kind in ("keys", "causal keys"):
        return every & ~hidden[:1] & ((lag >= 0) | (kind == "keys"))
    if kind == "per row":
        return every & ~hidden & (lag >= 0)
    if kind == "heads":
        return every & (torch.arange(heads)[:, None, None] * torch.arange(keys) % 2 == 0)
    if kind == "holes":
        every[:, :, 0, 1] = False
    return every


def _written(visible: Tensor, additive: bool) -> Tensor:
    """As torch has masks: bool, True where forbidden, or 0 and -inf."""
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, float("-inf")) if additive else ~visible


def torchs_own(drawn: Draw) -> Tensors:
    """out and all gradients of torch's own module.

    Told ``is_causal`` and not asked for weights, torch 2.11 to 2.15 hides the keys of add_bias_kv and add_zero_attn from the
    first queries; asked for weights it shows them to all.
    """
    module = drawn.module().eval()
    inputs = leaves(drawn.query, drawn.key, drawn.value)
    added = drawn.made["add_bias_kv"] or drawn.made["add_zero_attn"]
    needs = True if added and drawn.called.get("is_causal") else drawn.called.get("need_weights", True)
    out, _ = module(*inputs, **drawn.called | {"need_weights": needs})
    out.backward(drawn.cotangent())
    return {"out": out.detach(), **gradients_of(inputs), **weights_of(module)}


def over_a_ring(group: Group, seeds: list[int]) -> list[Tensors | str]:
    """Return for each draw out and all gradients gathered in natural order, or the words in which it is refused."""
    draws = [draw(seed) for seed in seeds]
    return [computed(group, drawn, partial(MultiheadAttention, group=group, layout=drawn.layout)) for drawn in draws]


def computed(group: Group, drawn: Draw, kind: Callable[..., nn.Module]) -> Tensors | str:
    """The same of one draw and a kind of module on this ring."""
    ranks, rank, dim = (1, 0, drawn.dim) if group is None else (group.size(), group.rank(), drawn.dim)
    module = drawn.module(kind).eval()
    module.load_state_dict(drawn.module().state_dict())
    mine = lambda x, dim: to_layout(x, drawn.layout, ranks, dim).chunk(ranks, dim)[rank].contiguous()
    inputs = leaves(*(mine(x, dim) for x in (drawn.query, drawn.key, drawn.value)), same=drawn.query is drawn.key)
    called = dict(drawn.called)
    if "key_padding_mask" in called:
        called["key_padding_mask"] = mine(called["key_padding_mask"], -1)
    try:
        out, nothing = module(*inputs, **called, **drawn.lengths)
    except ValueError as error:
        return re.sub("^rank [0-9]: ", "", str(error))
    assert nothing is None
    out.backward(mine(drawn.cotangent(), dim))
    sum_gradients(module, group)

    def whole(x: Tensor, length: int) -> Tensor:
        shards = [torch.empty_like(x) for _ in range(ranks)]
        if group is not None:
            dist.all_gather(shards, x.detach().contiguous(), group=group)
        return from_layout(torch.cat(shards if group else [x.detach()], dim), drawn.layout, ranks, length, dim)

    lengths = {"query": drawn.query.shape[dim], "key": drawn.key.shape[dim], "value": drawn.key.shape[dim]}
    gradients = {name: whole(x, lengths[name]) for name, x in gradients_of(inputs).items()}
    return {"out": whole(out, lengths["query"]), **gradients, **weights_of(module)}


def leaves(query: Tensor, key: Tensor, value: Tensor, same: bool | None = None) -> list[Tensor]:
    """Tensors that want gradients; one where all three are one."""
    if query is key if same is None else same:
        return [query.clone().requires_grad_()] * 3
    return [x.clone().requires_grad_() for x in (query, key, value)]


def gradients_of(inputs: list[Tensor]) -> Tensors:
    return {name: x.grad for name, x in zip(("query", "key", "value"), inputs, strict=True) if x.grad is not None}


def weights_of(module: nn.Module) -> Tensors:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
