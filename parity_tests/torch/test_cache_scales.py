"""The scales of KVCache in float8: given ones, those of the first token, and steps that leave none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from .caches import late_on_rank, small


def test_given_scales_are_kept_and_what_exceeds_them_is_cut():
    scale = torch.tensor([[0.5, 1.0], [2.0, 0.25]])
    cache = small(dtype="float8_e4m3fn", k_scale=scale, v_scale=scale)
    step = cache.step()
    for layer in range(2):
        cache.append(layer, torch.full((2, 1, 2, 8), 300.0), torch.full((2, 1, 2, 8), -300.0), step)
    cache.advance(step)
    assert cache.k[:, 0, 0, :, 0].float().tolist() == [[448, 288], [144, 448]]
    assert cache.v[:, 0, 0, :, 0].float().tolist() == [[-448, -288], [-144, -448]]
    assert torch.equal(cache.reset().k_scale, scale)
    with pytest.raises(ValueError, match=r"v_scale must be \[layers, kv_heads\] = \[2, 2\], got \[2\]"):
        small(dtype="float8_e4m3fn", k_scale=scale, v_scale=torch.ones(2))
    with pytest.raises(ValueError, match="k_scale and v_scale go together"):
        small(dtype="float8_e4m3fn", k_scale=scale)
    for wrong, message in ((scale * 0, r"k_scale\[0, 0\]=0.0: .* must be finite and above 0"), ([[1.0]], "got list")):
        with pytest.raises(ValueError, match=message):
            small(dtype="float8_e4m3fn", k_scale=wrong, v_scale=scale)


def test_a_step_that_stops_leaves_no_scale_and_one_that_advances_leaves_its_own():
    cache = small(dtype="float8_e4m3fn")

    def written(value: float, step: Any) -> None:
        new = torch.full((2, 1, 2, 8), value)
        for layer in range(2):
            cache.append(layer, new, new, step)

    written(1e6, cache.step())  # a step that ends here
    step = cache.step()
    written(1.0, step)
    cache.advance(step)
    assert (cache.k_scale == 2.0**-8).all()
    cache.scaled.clear()  # as in a graph that was captured after a reset, and is replayed
    written(1e6, cache.step())
    assert (cache.k_scale == 2.0**-8).all() and (cache.v_scale == 2.0**-8).all()


@pytest.mark.parametrize("first", ["chunk", "step"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_without_a_token_leaves_no_scale(gloo, ranks, first):
    """Check that a request has the bits that it has alone, for any values without a token and any rank of its first token."""
    for late, alone in gloo(ranks, late_on_rank, first):
        for name, x in alone.items():
            dim = {"k": 1, "v": 1, "k_scale": None, "v_scale": None}.get(name, 0)
            np.testing.assert_array_equal(late[name] if dim is None else late[name].take([1], dim), x, err_msg=name)
        assert (alone["k_scale"] == 2.0**-8).all()


def test_scales_are_float32_whatever_torchs_default_is():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert small(dtype="float8_e4m3fn").k_scale.dtype == torch.float32  # type: ignore[union-attr]
    finally:
        torch.set_default_dtype(torch.float32)
