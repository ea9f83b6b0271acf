"""One run of the steps, or the transfer of weights to the other framework and back, in fresh processes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..support.process import answer, argument, run_fresh
from .recipe import Recipe

ONE = "PyTorch, one process"
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}


def steps(way: str, recipe: Recipe) -> dict[str, list[float]]:
    """Return the losses and gradient norms of all steps."""
    processes = 1 if way == ONE or way.startswith("JAX") else 4
    return run_fresh(__name__, {"way": way, "recipe": asdict(recipe)}, processes, DEVICES)[0]


def moved(recipe: Recipe) -> dict[str, Any]:
    """Return the relative difference of JAX's logits from PyTorch's with PyTorch's trained weights, moved to JAX.

    Also return whether the weights, moved back to PyTorch, give the same logits bitwise.
    """
    return run_fresh(__name__, {"way": "moved", "recipe": asdict(recipe)}, environment=DEVICES)[0]


def in_torch(way: str, recipe: Recipe, rank: int, store: str) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist

    from . import torch_side

    torch.set_num_threads(1)
    if way == ONE:
        return torch_side.train(recipe, torch_side.made(recipe))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=torch_side.RANKS)
    mesh = torch_side.mesh_of(torch_side.WAYS[way])
    found = torch_side.train(recipe, torch_side.made(recipe, mesh), torch_side.WAYS[way], mesh)
    dist.destroy_process_group()
    return found


def in_jax(way: str, recipe: Recipe) -> dict[str, list[float]]:
    import jax

    from . import jax_side

    jax.config.update("jax_enable_x64", recipe.dtype == "float64")
    mesh = jax_side.mesh_of(way)
    return jax_side.train(recipe, jax_side.made(recipe, mesh), mesh)


def logits_of(model: Any, ids: Any) -> Any:
    """Return PyTorch's logits in natural order."""
    import torch

    import ring_attn_torch

    with torch.no_grad():
        logits = model(ring_attn_torch.to_layout(torch.from_numpy(ids), "zigzag", 1), length=ids.shape[1])
    return ring_attn_torch.from_layout(logits, "zigzag", 1, ids.shape[1]).numpy()


def there_and_back(recipe: Recipe) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import ring_attn_jax
    import ring_attn_torch

    from . import jax_side, torch_side
    from .recipe import LENGTH, batch

    jax.config.update("jax_enable_x64", recipe.dtype == "float64")
    model = torch_side.made(recipe)
    torch_side.train(recipe, model)
    ids = batch(recipe.steps)["ids"]
    before = logits_of(model, ids)
    ours = jax_side.made(recipe, jax_side.mesh_of("JAX, a ring of 4"))
    ring_attn_jax.from_numpy(ours, ring_attn_torch.to_numpy(model))
    logits = jax.jit(lambda ids: ours(ids, length=LENGTH))(ring_attn_jax.to_layout(jnp.asarray(ids), "zigzag", 4))
    theirs = np.asarray(ring_attn_jax.from_layout(logits, "zigzag", 4, LENGTH))
    again = ring_attn_torch.from_numpy(torch_side.made(recipe), ring_attn_jax.to_numpy(ours))
    after = logits_of(again, ids)
    error = float(np.linalg.norm(theirs - before) / np.linalg.norm(before))
    return {"logits_apart": error, "same_bits_after_the_way_back": bool((before == after).all())}


if __name__ == "__main__":
    given = argument()
    recipe = Recipe(**given["recipe"])
    if given["way"] == "moved":
        answer(there_and_back(recipe))
    elif given["way"].startswith("JAX"):
        answer(in_jax(given["way"], recipe))
    else:
        answer(in_torch(given["way"], recipe, given["rank"], given["store"]))
