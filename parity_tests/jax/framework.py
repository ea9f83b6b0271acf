"""JAX for the claims of both packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ring_attn_jax
from ring_attn_core import full

from ..claims.framework import Framework
from . import caches, decode, models, ring


class Jax(Framework):
    name = "jax"
    package = ring_attn_jax
    no_ring: ClassVar = {"axis_name": None}

    def __init__(self, pool: Callable[[], Any] | None = None) -> None:
        """Take no pool: the ring is one of host devices."""

    def array(self, x: Any, dtype: str | None = None) -> Any:
        return jnp.asarray(x if isinstance(x, jax.Array) else np.asarray(x), dtype)

    def numpy(self, x: Any) -> np.ndarray:
        return np.asarray(x, np.float64)

    def x64(self) -> Any:
        return jax.enable_x64(True)

    def pull(self, function: Callable[..., Any], leaves: Sequence[Any], cotangents: Sequence[Any] | None = None) -> Any:
        return self._pulled(_program(function), leaves, cotangents, {})

    def over_ring(self, ranks: int, function: Any, shards: Any, whole: Any = (), cotangents: Any = None, **given: Any) -> Any:
        out = ring.SEQ if cotangents is None or cotangents[0].ndim > 1 else ring.REPLICATED
        specs = (*[ring.SEQ] * len(shards), *[ring.REPLICATED] * len(whole))
        where: Any = {"mesh": ring.mesh_of(ranks), "in_specs": (specs, ring.SEQ), "out_specs": out}
        try:
            program = _kept(function.func, function.args, tuple(function.keywords.items()), tuple(where.items()))
        except (AttributeError, TypeError):  # no partial, or one of arguments that are compared by nothing
            program = _program(function, where)
        return self._pulled(program, [*shards, *whole], cotangents, given)

    def _pulled(self, program: Any, leaves: Any, cotangents: Any, given: Any) -> Any:
        with jax.enable_x64(True) if any(x.dtype in (np.float64, np.int64) for x in leaves) else nullcontext():
            dys = None if cotangents is None else list(map(self.array, cotangents))
            both = program(list(map(self.array, leaves)), dys, self.arrays(given))
            return tuple([self.numpy(x) for x in each] for each in both)

    def is_constant(self, function: Any, x: np.ndarray) -> bool:
        return not jax.grad(function)(self.array(x)).any()

    def refuses(self, message: str, ranks: int, function: Any, *shards: Any) -> None:
        sharded = jax.shard_map(function, mesh=ring.mesh_of(ranks), in_specs=ring.SEQ, out_specs=ring.SEQ)
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(sharded, *map(self.array, shards))

    def alone(self, name: str) -> Any:
        return partial(getattr(self.package, f"sharded_{name}"), mesh=ring.mesh_of(1))

    def compiled(self, function: Any) -> Any:
        return jax.jit(function)

    def tiles(self, case: Any) -> Any:
        return ring.patch_tiles(case)

    def ring(self, ranks: int) -> dict[str, Any]:
        return {"mesh": ring.mesh_of(ranks)}

    def make(self, layer: str, *sizes: Any, **arguments: Any) -> Any:
        return attrgetter(layer)(self.package)(*sizes, **arguments, rngs=nnx.Rngs(0))

    def parameters(self, model: Any) -> list[Any]:
        return jax.tree.leaves(nnx.state(model, nnx.Param))

    def trainee(self) -> tuple[Any, Any]:
        from .test_checkpoint import made

        return made()

    def attention(self, case: Any, *, once: bool = False, anew: bool = False, quick: bool = True) -> Any:
        if once:
            return ring.run_once(case)
        return (ring.run.__wrapped__ if anew else ring.run)(case, quick)

    def decode(self, problems: Any) -> Any:
        try:
            return [decode.run(problem) for problem in problems]
        finally:
            decode.program.cache_clear()

    def play(self, story: Any) -> Any:
        return caches.play(story)

    def decode_alone(self, **arguments: Any) -> Any:
        arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
        options = {name: x for name, x in arguments.items() if name not in arrays}
        specs = ({name: ring.SEQ if name in decode.OF_CACHE else ring.REPLICATED for name in arrays},)
        call = lambda given: self.tree_attention_decode(**given, **options)
        return jax.jit(jax.shard_map(call, mesh=ring.mesh_of(1), in_specs=specs, out_specs=ring.REPLICATED))(arrays)

    def merged_over_ring(self, ranks: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
        own = lambda q, k, v: self.merge_ring(self.attend_block(q, k, v, mask=full()))
        specs = ring.REPLICATED, ring.SEQ, ring.SEQ
        return jax.jit(jax.shard_map(own, mesh=ring.mesh_of(ranks), in_specs=specs, out_specs=ring.REPLICATED))(q, k, v)

    def layer(self, weights: Any, x: np.ndarray, dout: np.ndarray, ranks: int, arguments: Any, *, whole: bool = False) -> Any:
        return models.run_layer(weights, x, dout, ranks, arguments, whole)

    def transformer(self, ranks: int, layout: str, data: Any, **options: Any) -> Any:
        return models.run_transformer(ranks, layout, data, **options)


def _program(function: Callable[..., Any], where: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Return a program of leaves, their results' cotangents and constants; with ``where`` over a ring."""

    def attend(leaves: Any, given: Any) -> Any:
        return got if isinstance(got := function(*leaves, **given), tuple) else (got,)

    def program(leaves: Any, cotangents: Any, given: Any) -> Any:
        over = attend if where is None else jax.shard_map(attend, **where)
        got, vjp = jax.vjp(lambda *leaves: over(leaves, given), *leaves)
        return got, vjp(
            tuple(jnp.ones_like(y) if cotangents is None else cotangents[i].astype(y.dtype) for i, y in enumerate(got))
        )

    return jax.jit(program, compiler_options=ring.QUICK if jax.default_backend() == "cpu" else None)


@lru_cache(maxsize=256)
def _kept(function: Callable[..., Any], first: tuple[Any, ...], options: tuple[tuple[str, Any], ...], where: Any) -> Any:
    return _program(partial(function, *first, **dict(options)), dict(where))
