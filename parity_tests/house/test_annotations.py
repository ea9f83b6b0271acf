"""The shapes in the public signatures are true: jaxtyping checks them on real calls, here and never in a user's program."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from beartype import beartype
from jaxtyping import Bool, Float, Int, TypeCheckError, jaxtyped

import ring_attn_jax
import ring_attn_torch


def checked(function: Any, array: type) -> Any:
    """``function`` with its annotations, which are strings to everyone else, resolved and checked at every call."""
    function = inspect.unwrap(function)
    scope = {**function.__globals__, "Array": array, "Tensor": array, "Bool": Bool, "Float": Float, "Int": Int}
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = {name: eval(note, scope) for name, note in inspect.get_annotations(function).items()}
    return jaxtyped(copy, typechecker=beartype)


def in_torch(heads=4, kv_heads=2, k_dim=8):
    return torch.ones(1, 6, heads, 8), torch.ones(1, 6, kv_heads, k_dim), torch.ones(1, 6, kv_heads, 5)


def in_jax(**sizes):
    return [jnp.asarray(x.numpy()) for x in in_torch(**sizes)]


def test_ring_attention_takes_what_its_signature_says():
    call = checked(ring_attn_torch.ring_attention, torch.Tensor)
    assert call(*in_torch()).shape == (1, 6, 4, 5)
    with pytest.raises(TypeCheckError):
        call(*in_torch(k_dim=7))


def test_sharded_ring_attention_takes_what_its_signature_says():
    call = checked(ring_attn_jax.sharded_ring_attention, jax.Array)
    mesh = jax.make_mesh((1,), ("seq",), devices=jax.devices()[:1])
    assert call(*in_jax(), mesh=mesh).shape == (1, 6, 4, 5)
    with pytest.raises(TypeCheckError):
        call(*in_jax(k_dim=7), mesh=mesh)


def test_summary_attention_takes_what_its_signature_says():
    call = checked(ring_attn_torch.summary_attention, torch.Tensor)
    assert call(*in_torch(), torch.ones(1, 2, 8), block=2, window=1).shape == (1, 6, 4, 5)
    with pytest.raises(TypeCheckError):
        call(*in_torch(), torch.ones(1, 2, 7), block=2, window=1)


@pytest.mark.parametrize("name", ["flash_attn_func", "scaled_dot_product_attention"])
def test_functions_under_known_names_take_what_their_signatures_say(name):
    call = checked(getattr(ring_attn_torch.functional, name), torch.Tensor)
    into = (lambda x: x) if name.startswith("flash") else (lambda x: x.transpose(1, 2))
    assert call(*map(into, in_torch(kv_heads=4))).numel() == 6 * 4 * 5
    with pytest.raises(TypeCheckError):
        call(*map(into, in_torch(kv_heads=4, k_dim=7)))


def test_jaxs_function_under_its_known_name_takes_what_its_signature_says():
    call = checked(ring_attn_jax.functional.dot_product_attention, jax.Array)
    q, k, _ = in_jax()
    assert call(q, k, k, axis_name=None, mask=jnp.ones((6, 6), bool)).shape == (1, 6, 4, 8)
    with pytest.raises(TypeCheckError):
        call(q, k[..., :7], k, axis_name=None)


@pytest.mark.parametrize(("call", "arrays"), [("ring_attention", "qkv"), ("summary_attention", ("q", "k", "v", "pool"))])
def test_both_signatures_name_the_same_shapes(call, arrays):
    ours, theirs = (inspect.get_annotations(getattr(p, call)) for p in (ring_attn_jax, ring_attn_torch))
    for name in arrays:
        assert ours[name].replace("Array", "Tensor") == theirs[name]


@pytest.mark.parametrize(
    ("package", "array"), [(ring_attn_jax, jax.Array), (ring_attn_torch, torch.Tensor)], ids=["jax", "torch"]
)
def test_shard_batch_and_positions_are_what_they_say(package, array):
    ids = torch.arange(20).reshape(2, 10)
    ids = ids if array is torch.Tensor else jnp.asarray(ids.numpy())
    assert checked(package.shard_batch, array)(ids, "zigzag", 2, 1).ids.shape == (2, 6)
    assert checked(package.positions, array)("zigzag", 2, 10, 1).shape == (6,)
    with pytest.raises(TypeCheckError):
        checked(package.shard_batch, array)(ids, "zigzag", 2, 1, labels=ids[:, 1:])
