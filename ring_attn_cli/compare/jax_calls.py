"""The calls of variants that JAX alone has. Other packages are called as their documentation says, in their own layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .worker import Arrays, Call, Function


def build_ringattention(call: Call) -> Function:
    """Return a function that calls the package ringattention, on contiguous shards with one query and one key chunk per rank."""
    from ringattention import ringattention_jax as attend  # pyright: ignore[reportMissingImports]

    case, local = call.case, call.plan.seq_local
    options = {"query_chunk_size": local, "key_chunk_size": local, "causal_block_size": 1 if case.mask == "causal" else None}
    options |= {"deterministic": True, "dropout_rng": None, "attn_pdrop": 0.0, "dtype": jnp.float32, "precision": None}
    options |= {"policy": jax.checkpoint_policies.nothing_saveable, "prevent_cse": True}

    def attention(arrays: Arrays) -> Arrays:
        q, k, v = (arrays[name] for name in "qkv")
        return {"out": attend(q, k, v, None, None, None, call.ring["axis_name"], True, options)}

    attention.check_vma = False  # its backward does not track varying axes
    return attention
