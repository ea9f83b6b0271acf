"""The framework of a claim about both packages: one package's names, its framework's arrays, and its rings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from ring_attn_core.reference.oracle import Attention
from ring_attn_core.reference.tolerance import relative_error

from ..support.cases import Case
from ..support.decode import Problem
from ..support.dilated import Case as Dilated
from ..support.models import Arrays
from ..support.stories import Story
from ..support.summaries import SummaryCase


class Framework(ABC):
    """A package of ours, and its framework: ``framework.RingAttention`` is the package's.

    ``framework.attention(case)`` runs a case over its ring, of host devices in JAX, of gloo processes in PyTorch.
    """

    name: str
    package: ModuleType
    no_ring: dict[str, Any]
    """The keywords that tell a function that its arrays are whole, without a ring."""

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self).package, name)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))

    @abstractmethod
    def array(self, x: Any, dtype: str | None = None) -> Any:
        """Return the framework's array of ``x``, by default of the dtype of ``np.asarray(x)``."""

    def arrays(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return ``arguments`` with the framework's arrays in the place of numpy's."""
        return {name: self.array(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}

    @abstractmethod
    def numpy(self, x: Any) -> np.ndarray:
        """Return an array of ours, of any dtype of floating point, in float64."""

    @abstractmethod
    def x64(self) -> AbstractContextManager[Any]:
        """Return a context in which arrays may be float64."""

    @abstractmethod
    def pull(
        self, function: Callable[..., Any], leaves: Sequence[Any], cotangents: Sequence[Any] | None = None
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the results of ``function(*leaves)`` and the gradients of the leaves; cotangents of None are 1."""

    @abstractmethod
    def is_constant(self, function: Callable[[Any], Any], x: np.ndarray) -> bool:
        """Return whether ``function(x)`` has no gradient of x, or one of zeros."""

    @abstractmethod
    def over_ring(
        self,
        ranks: int,
        function: Callable[..., Any],
        shards: Sequence[Any],
        whole: Sequence[Any] = (),
        cotangents: Sequence[Any] | None = None,
        **given: Any,
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return ``pull`` of a function of a package, or of a test file, that runs over a ring.

        It takes this rank's part of ``shards`` [batch, tokens, ...] and of ``given``, which are constants, and ``whole`` as it
        is. Its results are shards, or of every rank alike and without tokens.
        """

    @abstractmethod
    def refuses(self, message: str, ranks: int, function: Callable[..., Any], *shards: Any) -> None:
        """Assert that a call over a ring is refused in these words, on all ranks alike."""

    @abstractmethod
    def alone(self, name: str) -> Callable[..., Any]:
        """Return a function of the package, such as "ring_attention", of whole arrays on a ring of one."""

    @abstractmethod
    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as one program in JAX, which compiles each operation else, and as it is in PyTorch."""

    @abstractmethod
    def tiles(self, case: Case) -> AbstractContextManager[Any]:
        """Return a context in which the blockwise backend has the tiles of a case."""

    @abstractmethod
    def ring(self, ranks: int) -> dict[str, Any]:
        """Return the arguments that make a ring of so many devices; of one process in PyTorch, none."""

    @abstractmethod
    def make(self, layer: str, *sizes: Any, **arguments: Any) -> Any:
        """Return an instance of this layer with first weights, or what its classmethod "Layer.method" returns."""

    @abstractmethod
    def parameters(self, model: Any) -> list[Any]:
        """Return the arrays that a model trains."""

    @abstractmethod
    def trainee(self) -> tuple[Any, Any]:
        """Return a small model and its optimizer."""

    @abstractmethod
    def attention(self, case: Case, *, once: bool = False, anew: bool = False, quick: bool = True) -> Attention:
        """Run a case; what JAX keeps: ``once``, nothing, ``anew``, no results; not ``quick``, its compiler is the users'."""

    def dilated(self, case: Dilated) -> Attention:
        """Run a case: whole arrays, padding included."""
        inputs = case.inputs()
        given: dict[str, Any] = {"key_mask": inputs.pop("key_mask")} if case.key_mask else {}
        q, k, v, dout, dlse = (self.array(x, None if name == "dlse" else case.dtype) for name, x in inputs.items())
        call = partial(self.dilated_attention, **case.arguments, return_lse=True)
        got, gradients = self.over_ring(case.ranks, call, [q, k, v], cotangents=[dout, dlse], **given)
        return Attention(*got, *gradients)

    def summary(self, case: SummaryCase) -> list[Any]:
        """Run a case: out, lse, dq, dk, dv as whole arrays, padding included, and dpool."""
        arrays = {name: self.array(x, None if name in ("dlse", "key_mask") else case.dtype) for name, x in case.padded().items()}
        call = partial(self.summary_attention, **case.options, return_lse=True)
        pool = [arrays["pool"]] if "pool" in arrays else []
        given: dict[str, Any] = {name: arrays[name] for name in ("key_mask",) if name in arrays}
        cotangents = [arrays["dout"], arrays["dlse"]]
        got, gradients = self.over_ring(case.ranks, call, [arrays[name] for name in "qkv"], pool, cotangents, **given)
        return [*got, *gradients, *[None] * (not pool)]

    @abstractmethod
    def decode(self, problems: Sequence[Problem]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (out, lse) of problems of one shape, which all ranks get alike."""

    @abstractmethod
    def play(self, story: Story) -> Sequence[Sequence[dict[str, Any]]]:
        """Return [operations][ranks] of what a rank's cache has after every operation of a story."""

    @abstractmethod
    def decode_alone(self, **arguments: Any) -> Any:
        """Call tree_attention_decode on a ring of one."""

    @abstractmethod
    def merged_over_ring(self, ranks: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Sequence[np.ndarray]:
        """Return merge_ring of the blocks of q, on every rank the same, over each rank's part of k and v."""

    @abstractmethod
    def layer(
        self, weights: Arrays, x: np.ndarray, dout: np.ndarray, ranks: int, arguments: dict[str, Any], *, whole: bool = False
    ) -> Arrays:
        """Return out, dx and the weights' gradients of a layer of attention on a ring, in natural order.

        With ``segments`` among the arguments it is a DilatedRingAttention, with ``summaries`` a SummaryAttention. ``whole``: in
        JAX the layer has the mesh.
        """

    @abstractmethod
    def transformer(self, ranks: int, layout: str, data: Arrays, **options: Any) -> Arrays:
        """Return loss, logits and gradients of a RingTransformer, in natural order; ``data``: what shard_batch takes.

        ``options``: ``seed`` of dropout, ``chunk`` of a loss of hidden states, and the sizes.
        """


def check_agree(case: Case, a: Attention, b: Attention) -> float:
    """Return the largest relative distance of two frameworks' results, in norm, after asserting that it is at most 1e-6."""
    named = zip(Attention._fields, a, b, strict=True)
    errors = {name: relative_error(x, y) for name, x, y in named if x is not None and y is not None}
    assert len(errors) == 5 + case.sinks - case.values_in_keys
    assert max(errors.values()) <= 1e-6, errors
    return max(errors.values())


def library(x: Any) -> Any:
    """Return torch or jax.numpy, of which ``x`` is an array; both have functions of numpy's names."""
    return import_module("torch" if type(x).__module__.startswith("torch") else "jax.numpy")
