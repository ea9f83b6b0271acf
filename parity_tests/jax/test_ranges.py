"""Steps of a ring in JAX's profiler: the operations of each step carry its name, forward and backward."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp

from ring_attn_jax import sharded_ring_attention

from .ring import mesh_of


def test_the_operations_of_each_step_carry_its_name():
    ring = partial(sharded_ring_attention, mesh=mesh_of(4))
    x = jnp.ones((1, 32, 2, 8))
    text = jax.jit(jax.grad(lambda *qkv: ring(*qkv).sum(), (0, 1, 2))).lower(x, x, x).as_text(debug_info=True)
    steps = ["1 of 4, own keys", *(f"{n + 1} of 4, 1 KiB from {n} rank{'s' * (n > 1)} before" for n in range(1, 4))]
    expected = {f"ring step {step}{suffix}" for step in steps for suffix in ("", " backward")}
    assert {*re.findall(r"ring step [^/\"]*", text)} == expected
