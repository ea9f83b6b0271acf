"""PyTorch for the claims of both packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import torch

import ring_attn_torch
from ring_attn_core import full

from ..claims.framework import Framework
from ..support.spawn import PerRank
from . import caches, decode, models, ring


class Torch(Framework):
    name = "torch"
    package = ring_attn_torch
    no_ring: ClassVar = {}

    def __init__(self, pool: Callable[[], Any]) -> None:
        self.pool = pool

    def array(self, x: Any, dtype: str | None = None) -> Any:
        made = x if isinstance(x, torch.Tensor) else torch.from_numpy(np.array(x, order="C"))
        return made if dtype is None else made.to(getattr(torch, dtype))

    def numpy(self, x: Any) -> np.ndarray:
        return x.detach().double().numpy()

    def x64(self) -> Any:
        return nullcontext()

    def pull(self, function: Callable[..., Any], leaves: Sequence[Any], cotangents: Sequence[Any] | None = None) -> Any:
        return tuple([self.numpy(x) for x in each] for each in _pulled(function, map(self.array, leaves), cotangents))

    def over_ring(self, ranks: int, function: Any, shards: Any, whole: Any = (), cotangents: Any = None, **given: Any) -> Any:
        of_whole = cotangents is not None and cotangents[0].ndim < 2
        dys = cotangents if cotangents is None or of_whole else self._of_ranks(cotangents, ranks)
        constants = PerRank(*({name: self._parts(x, ranks)[rank] for name, x in given.items()} for rank in range(ranks)))
        arrays = self._of_ranks(shards, ranks), list(map(self.array, whole))
        results = self.pool()(ranks, _on_rank, function, *arrays, dys, constants)
        values, gradients = ([*zip(*each, strict=True)] for each in zip(*results, strict=True))
        assert not of_whole or all(torch.equal(x, of[0]) for of in values for x in of)
        out = [x[0] if of_whole else torch.cat(x, 1) for x in values]
        sums = [torch.cat(x, 1) if i < len(shards) else torch.stack(x).sum(0) for i, x in enumerate(gradients)]
        return tuple([self.numpy(x) for x in each] for each in (out, sums))

    def _parts(self, x: Any, ranks: int) -> list[torch.Tensor]:
        return [part.clone() for part in self.array(x).chunk(ranks, 1)]

    def _of_ranks(self, arrays: Any, ranks: int) -> PerRank:
        return PerRank(*(zip(*(self._parts(x, ranks) for x in arrays), strict=True) if arrays else [()] * ranks))

    def is_constant(self, function: Any, x: np.ndarray) -> bool:
        return not function(self.array(x).requires_grad_()).requires_grad

    def refuses(self, message: str, ranks: int, function: Any, *shards: Any) -> None:
        self.pool().refuse(message, ranks, _called, function, *(PerRank(*self._parts(x, ranks)) for x in shards))

    def alone(self, name: str) -> Any:
        return getattr(self.package, name)

    def compiled(self, function: Any) -> Any:
        return function

    def tiles(self, case: Any) -> Any:
        return ring.patch_tiles(case)

    def ring(self, ranks: int) -> dict[str, Any]:
        return {}

    def make(self, layer: str, *sizes: Any, **arguments: Any) -> Any:
        torch.manual_seed(0)
        return attrgetter(layer)(self.package)(*sizes, **arguments)

    def parameters(self, model: Any) -> list[Any]:
        return [*model.parameters()]

    def trainee(self) -> tuple[Any, Any]:
        from .test_checkpoint import made

        return made()

    def attention(self, case: Any, *, once: bool = False, anew: bool = False, quick: bool = True) -> Any:
        return (ring.run_or_restart if once else ring.run)(self.pool(), case)

    def decode(self, problems: Any) -> Any:
        return decode.run(self.pool(), problems)

    def play(self, story: Any) -> Any:
        return list(zip(*self.pool()(story.ranks, caches.on_rank, story), strict=True))

    def decode_alone(self, **arguments: Any) -> Any:
        return self.tree_attention_decode(**arguments)

    def merged_over_ring(self, ranks: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
        parts = PerRank(*zip(*(self._parts(x, ranks) for x in (k, v)), strict=True))
        first, *others = self.pool()(ranks, _merged, self.array(q), parts)
        assert all(torch.equal(x, y) for other in others for x, y in zip(other, first, strict=True))
        return list(map(self.numpy, first))

    def layer(self, weights: Any, x: np.ndarray, dout: np.ndarray, ranks: int, arguments: Any, *, whole: bool = False) -> Any:
        return self._same(ranks, models.layer_on_rank, weights, x, dout, arguments)

    def transformer(self, ranks: int, layout: str, data: Any, **options: Any) -> Any:
        on_rank = partial(models.transformer_on_rank, layout=layout, data=data, **options)
        return on_rank(None) if ranks == 1 else self._same(ranks, on_rank)

    def _same(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what every rank has computed, equal to the bit."""
        first, *others = self.pool()(ranks, function, *arguments)
        assert all(np.array_equal(other[name], y, equal_nan=True) for other in others for name, y in first.items())
        return first


def _pulled(function: Any, arrays: Any, cotangents: Any) -> tuple[Any, Any]:
    inputs = [x.detach().requires_grad_() for x in arrays]
    got = function(*inputs)
    got = got if isinstance(got, tuple) else (got,)
    dys = [torch.ones_like(y) if cotangents is None else torch.as_tensor(cotangents[i]).to(y) for i, y in enumerate(got)]
    return [y.detach() for y in got], torch.autograd.grad(got, inputs, dys)


def _on_rank(group: Any, function: Any, shards: Any, whole: Any, cotangents: Any, given: Any) -> Any:
    return _pulled(partial(function, group=group, **given), [*shards, *whole], cotangents)


def _merged(group: Any, q: torch.Tensor, keys: Any) -> Any:
    return ring_attn_torch.merge_ring(ring_attn_torch.attend_block(q, *keys, mask=full()), group=group)


def _called(group: Any, function: Any, *shards: Any) -> Any:
    function(*shards, group=group)
