"""The torch layers over dilated attention: dense attention of the same sparsity, torch's own module, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn_torch import DilatedAttention, DilatedRingAttention, dilated_attention
from ring_attn_torch.variants.dilated import COMPILES

from ..support.selection import first
from ..support.spawn import PerRank
from .dilated_layer import PATTERNS, WHOLE, densely, dilated_over_a_ring, draw_dilated
from .multihead import Group, torchs_own

SIZES: dict[str, Any] = {"embed_dim": 12, "num_heads": 2, "batch_first": True}
TWO: dict[str, Any] = {"segments": (3, 8), "dilations": (1, 2)}
SEEDS = range(120)
"""Every ring has calls of its own."""


@pytest.mark.parametrize("ranks", first([3, 1, 2, 4]))
def test_random_calls_are_dense_attention_of_the_same_sparsity_or_refused_by_name(gloo, ranks):
    draws = [drawn for seed in SEEDS[ranks - 1 :: 4] if (drawn := draw_dilated(seed, PATTERNS))]
    check_draws(draws, gloo(ranks, dilated_over_a_ring, draws), densely)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", first([3, 1]))
def test_random_calls_of_one_segment_are_torchs_own(gloo, ranks):
    draws = [drawn for seed in SEEDS[ranks - 1 :: 3] if (drawn := draw_dilated(seed, [WHOLE]))]
    check_draws(draws, gloo(ranks, dilated_over_a_ring, draws), torchs_own)


def check_draws(draws, results, truth) -> None:
    """Assert that every draw is its truth on all ranks, or refused in the same words by all for what it is refused."""
    masked = 0
    for drawn, *of_ranks in zip(draws, *results, strict=True):
        got = of_ranks[0]
        if isinstance(got, str):
            assert len({*of_ranks}) == 1
            with pytest.raises(ValueError, match=drawn.refused or "attn_mask is not a band"):
                raise ValueError(got)
            continue
        assert drawn.refused is None
        masked += "attn_mask" in drawn.called
        expected = truth(drawn)
        assert got.keys() == expected.keys()
        for name, x in expected.items():
            distance = (got[name] - x).norm() / max(x.norm(), 0.01)
            assert distance < 1e-11, f"{name} differs by {distance:.3g}\n{drawn}"
    assert masked > 2


def test_tokens_that_all_patterns_leave_out_attend_to_nothing():
    module, x = DilatedAttention(**SIZES, segments=(6,), dilations=(3,)), torch.randn(2, 7, 12, requires_grad=True)
    out, _ = module(x, x, x)
    assert torch.equal(out[:, 2::3], module.out_proj.bias.expand(2, 2, 12))  # two heads keep the offsets 0 and 1
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[:, 2::3], torch.zeros(2, 2, 12))
    assert x.grad[:, ::3].norm() > 0


def test_a_layer_can_be_moved_to_another_dtype():
    for module in (DilatedAttention(**SIZES, **TWO, add_bias_kv=True, add_zero_attn=True), DilatedRingAttention(12, 2, **TWO)):
        x = torch.ones(1, 6, 12, dtype=torch.bfloat16)
        out = module.bfloat16()(*[x] * (3 if isinstance(module, DilatedAttention) else 1))
        assert (out[0] if isinstance(out, tuple) else out).dtype == torch.bfloat16


@pytest.mark.skipif(COMPILES, reason="PyTorch compiles it")
def test_a_pytorch_that_compiles_it_to_something_else_is_refused_by_name():
    x = torch.randn(1, 8, 2, 4)
    call = torch.compile(lambda x: dilated_attention(x, x, x, **TWO), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"before 2\.15"):
        call(x)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(not COMPILES, reason="PyTorch before 2.15 compiles it to something else")
def test_a_compiled_call_needs_no_break_of_the_graph():
    module, x, padding = DilatedAttention(**SIZES, **TWO), torch.randn(2, 8, 12), torch.arange(8).expand(2, 8) > 5
    compiled = torch.compile(module, backend="eager", fullgraph=True)(x, x, x, padding, is_causal=True)[0]
    torch.testing.assert_close(compiled, module(x, x, x, padding, is_causal=True)[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"segments": (3, 8), "dilations": (1,)}, "one dilation for each segment"),
        ({"segments": (3, 8, 9), "dilations": (1, 2, 3), "mixing": "heads"}, "got 3 patterns for 2 heads"),
        ({**TWO, "strategy": "mesh"}, "strategy"),
        ({**TWO, "deterministic": 1}, "deterministic must be True or False"),
    ],
)
def test_patterns_and_options_that_do_not_fit_are_refused_when_made(arguments, words):
    with pytest.raises(ValueError, match=words):
        DilatedAttention(**SIZES, **arguments)


def test_dropout_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"dropout=0.1: dilated_attention drops no probabilities, for a query has several"):
        DilatedAttention(**SIZES, **TWO, dropout=0.1)
    module, x = DilatedAttention(**SIZES, **TWO), torch.randn(2, 8, 12)
    module.dropout = 0.2
    with pytest.raises(ValueError, match=r"dropout=0.2: dilated_attention drops no"):
        module(x, x, x)


HOLES = torch.zeros(8, 8, dtype=torch.bool)
HOLES[5:, :5] = HOLES[:5, 5:] = True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"need_weights": True}, "need_weights=True asks"),
        ({"attn_mask": HOLES}, "attn_mask is not a band: dilated attention takes causal masks and sliding windows"),
        ({"attn_mask": torch.zeros(8, 8), "is_causal": True}, "is_causal=True beside an attn_mask that is not"),
        ({"attn_mask": torch.zeros(8, 7)}, r"attn_mask must be whole, .*, got \[8, 7\] for shards of 8"),
        ({"key_padding_mask": torch.zeros(8, dtype=torch.bool)}, r"key_padding_mask must be \[2, 8\], .*, got \[8\]"),
        ({"length": 9}, "length"),
        ({"length": "8"}, "length must be int or None"),
    ],
)
def test_calls_that_do_not_fit_are_refused(arguments, words):
    x = torch.randn(2, 8, 12)
    with pytest.raises(ValueError, match=words):
        DilatedAttention(**SIZES, **TWO)(x, x, x, **arguments)


def test_inputs_that_do_not_fit_are_refused():
    module, x = DilatedAttention(**SIZES, **TWO), torch.randn(2, 8, 12)
    with pytest.raises(ValueError, match="query has 8 tokens and key 7: the segments of dilated attention are of one sequence"):
        module(x, x[:, 1:], x[:, 1:])
    with pytest.raises(ValueError, match=r"query must be a dense torch\.Tensor"):
        module([x], x, x)


def test_all_ranks_refuse_a_mask_or_segments_that_one_refuses(gloo):
    for mine, words in ((TWO, "attn_mask adds numbers other than 0"), (WHOLE, "the ranks of this ring disagree on segments")):
        masks = PerRank(torch.zeros(8, 8), torch.zeros(8, 8) + (mine is TWO))
        gloo.refuse(words, 2, called_on_rank, masks, PerRank(mine, TWO))


def called_on_rank(group: Group, mask: Tensor, patterns: dict[str, Any]) -> Tensor:
    x = torch.ones(3, 4, 12)
    return DilatedAttention(**SIZES, **patterns, group=group)(x, x, x, attn_mask=mask)[0].detach()
