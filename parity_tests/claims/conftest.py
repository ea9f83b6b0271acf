"""The fixture ``framework``: a claim of both packages is tested once here, for JAX and for PyTorch."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import pytest


class Framework:
    """A package of ours, and its framework's arrays.

    ``framework.RingAttention`` is the package's, and ``framework.make("RingAttention", ...)`` an instance with first weights.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.package: ModuleType = importlib.import_module(f"ring_attn_{name}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.package, name)

    def array(self, x: Any, dtype: str | None = None) -> Any:
        """Return the framework's array of ``x``, by default of the dtype of ``np.asarray(x)``."""
        if self.name == "jax":
            return importlib.import_module("jax.numpy").asarray(np.asarray(x), dtype)
        torch = importlib.import_module("torch")
        made = torch.from_numpy(np.array(x, order="C"))
        return made if dtype is None else made.to(getattr(torch, dtype))

    def arrays(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return ``arguments`` with the framework's arrays in the place of numpy's."""
        return {name: self.array(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}

    def numpy(self, x: Any) -> np.ndarray:
        """Return an array of ours, of any dtype of floating point, in float64."""
        return np.asarray(x, np.float64) if self.name == "jax" else x.detach().double().numpy()

    def x64(self) -> AbstractContextManager[Any]:
        """Return a context in which arrays may be float64."""
        return importlib.import_module("jax").enable_x64(True) if self.name == "jax" else nullcontext()

    def ring(self, ranks: int) -> dict[str, Any]:
        """Return the arguments that make a ring of so many devices; of one process in PyTorch, none."""
        return {"mesh": importlib.import_module("parity_tests.jax.ring").mesh_of(ranks)} if self.name == "jax" else {}

    def make(self, layer: str, *sizes: Any, **arguments: Any) -> Any:
        rngs = {"rngs": importlib.import_module("flax.nnx").Rngs(0)} if self.name == "jax" else {}
        return getattr(self.package, layer)(*sizes, **arguments, **rngs)


@pytest.fixture(params=["jax", "torch"])
def framework(request: pytest.FixtureRequest) -> Framework:
    for needed in {"jax": ("jax", "flax"), "torch": ("torch",)}[request.param]:
        pytest.importorskip(needed)
    return Framework(request.param)
