"""Recurrences on a ring: states carried in order of position, messages of one length, and the same error on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ring_attn_torch

from .support.recurrences import DOCUMENTS, ids_of, place, relative

IDS = ids_of(DOCUMENTS)


def in_place(layout: str, ranks: int) -> tuple[Any, str, dict[str, Any]]:
    """Return where tokens are, the layout of a layer's constructor, and arguments of its call."""
    where = place(layout, ranks)
    return (where, "zigzag", {"layout": where}) if layout == "balanced" else (where, layout, {})


def test_one_device_of_jax_sends_no_state():
    jax = pytest.importorskip("jax")
    import ring_attn_jax

    from .claims.test_recurrences import errors
    from .jax.framework import Jax
    from .jax.ring import mesh_of

    assert max(errors(Jax(), 1, "mamba2", "contiguous", False, [[5], [5]])) < 1e-13
    bias, over = jax.numpy.ones((1, 1, 2, 3, 4)), jax.P(None, "seq")
    carried = lambda bias: ring_attn_jax.carry(bias, decay=bias[..., :1, :1], layout="contiguous")
    assert not jax.shard_map(carried, mesh=mesh_of(1), in_specs=over, out_specs=over)(bias).any()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layout": "striped"}, "a recurrence needs runs of consecutive tokens"),
        ({"extents": torch.zeros(2, 3, 2, dtype=torch.long)}, "extents must be integers"),
        ({"backend": "triton"}, 'a recurrence has the backends "auto" and "blockwise"'),
        ({"backend": "fla"}, 'backend="fla": '),
        ({"g": torch.zeros(2, 4, 2)}, "g must be"),
    ],
)
def test_a_mistake_is_the_same_error_on_every_rank(gloo, arguments, words):
    gloo.refuse(words, 2, mistaken, arguments)


def mistaken(group: Any, arguments: dict[str, Any]) -> None:
    x = torch.zeros(2, 4, 3, 5)
    arrays: dict[str, Any] = {"q": x, "k": x, "v": x, "g": x[..., 0], "beta": x[..., 0]} | arguments
    ring_attn_torch.gated_delta_rule(**arrays, group=group)


def test_a_carry_with_extents_of_another_shape_is_refused():
    bias = torch.zeros(1, 1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"extents must be integers \[1, tokens, 2\]"):
        ring_attn_torch.carry(bias, decay=bias[..., :1, :1], extents=torch.zeros(3, 2, dtype=torch.long))


def test_a_carry_in_bfloat16_is_refused():
    bias = torch.zeros(1, 1, 2, 3, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="carry takes float32 or float64"):
        ring_attn_torch.carry(bias, decay=bias[..., :1, :1])


@pytest.mark.parametrize("heads", [2, 8], ids=["gathered", "by heads"])
def test_a_carry_folds_the_runs_in_order_of_position(gloo, heads):
    for error in gloo(4, folded, heads):
        assert error < 1e-14


def folded(group: Any, heads: int) -> float:
    """Return the error of this rank's states, in zigzag: rank r has the runs r and 7 - r."""
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(2, 8, heads, 3, 5, generator=generator, dtype=torch.float64)
    transition = torch.randn(2, 8, heads, 3, 3, generator=generator, dtype=torch.float64)
    own = [group.rank(), 7 - group.rank()]
    found = ring_attn_torch.carry(bias[:, own], transition=transition[:, own], group=group)
    states = [torch.zeros_like(bias[:, 0])]
    for run in range(7):
        states.append(transition[:, run] @ states[-1] + bias[:, run])
    return relative(found, torch.stack(states, 1)[:, own].numpy())


def test_a_message_does_not_grow_with_the_length(gloo):
    (short, long), *_ = gloo(2, sent_bytes)
    assert short == long > 0


def sent_bytes(group: Any) -> list[int]:
    from unittest.mock import patch

    from ring_attn_torch.ring import collectives

    sent: list[int] = []
    gather = collectives.all_gather_single

    def count(out: Any, x: Any, *arguments: Any, **keywords: Any) -> Any:
        sent[-1] += x.nbytes
        return gather(out, x, *arguments, **keywords)

    with patch.object(collectives, "all_gather_single", count):
        for tokens in (16, 256):
            sent.append(0)
            x = torch.ones(1, tokens, 2, 3, requires_grad=True)
            out = ring_attn_torch.gated_delta_rule(x, x, x, -x[..., 0], x[..., 0], group=group)
            ring_attn_torch.causal_conv(out.flatten(2), torch.ones(6, 4), group=group).sum().backward()
    return sent
