"""The record by which "auto" chooses in JAX: that of this host, in a program of one process."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ring_attn_core.plan.machine import H200
from ring_attn_jax import sharded_ring_attention
from ring_attn_jax.call import autograd
from ring_attn_jax.ring import hardware

from .ring import mesh_of

SLOW_HOST = replace(H200, host_forward=1.0, host_backward=1.0)
"""A machine on which every step takes a second, so that the strategy of one step wins."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The strategies that are chosen with the record of a machine, of which CPUs are measured."""
    found, checked = [], autograd.checked

    def spied(problem, *, anywhere):
        compiled = checked(problem, anywhere=anywhere)
        found.append(compiled.strategy)
        return compiled

    monkeypatch.setattr(autograd, "checked", spied)
    monkeypatch.setattr(hardware, "MEASURED", ("cpu",))
    monkeypatch.setattr(hardware, "_stored", lambda device: SLOW_HOST)
    return found


def attend(x: jax.Array, strategy: str = "auto") -> jax.Array:
    """Return out. Each test passes its own number of tokens: a shape that was traced before is not traced again."""
    return sharded_ring_attention(x, x, x, mesh=mesh_of(2), strategy=strategy)


def trace(tokens: int) -> None:
    jax.eval_shape(attend, jax.ShapeDtypeStruct((1, tokens, 2, 8), jnp.float32))


def test_the_record_of_the_host_decides(taken: list[str]):
    x = jax.random.normal(jax.random.key(0), (1, 24, 2, 8))
    chosen, ring = attend(x), attend(x, "ring")
    assert taken == ["gather", "ring"]
    assert jnp.allclose(chosen, ring, atol=1e-6)


def test_a_program_of_several_processes_uses_no_record(taken: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    trace(40)
    assert taken == ["ring"]


def test_on_cpus_no_record_is_read(taken: list[str], monkeypatch: pytest.MonkeyPatch):
    def read(device: str) -> None:
        raise AssertionError("read")

    monkeypatch.undo()
    monkeypatch.setattr(hardware, "_stored", read)
    trace(56)
