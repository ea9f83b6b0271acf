"""The functions of functional are the originals over a ring, or say by name what they refuse."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import functional, ring_attention

from ..support.functional import DTYPES, assembled
from ..support.selection import first
from .functional import Group, originals, over_a_ring
from .functional_calls import DRAWS, draw

FEW, SOME, ALL = range(20), range(40), range(300)


def assert_exact_or_refused(name: str, seeds: range, results: list[list]) -> None:
    """``results``: what each rank returns of each draw."""
    for seed, *of_ranks in zip(seeds, *results, strict=True):
        call = draw(name, seed)
        if call.refused:
            for message in of_ranks:
                assert isinstance(message, str), f"draw {seed} is not refused: {call.refused}"
                with pytest.raises(ValueError, match=call.refused):
                    raise ValueError(message)
            continue
        assert not isinstance(of_ranks[0], str), f"draw {seed}: {of_ranks[0]}"
        lengths = dict(zip(("out", "lse", "dq", "dk", "dv"), (*[call.lengths[0]] * 3, *[call.lengths[1]] * 2), strict=True))
        got = {x: assembled([each[x] for each in of_ranks], call.layout, lengths[x]) for x in of_ranks[0]}
        try:
            call.check(got)
        except AssertionError as error:
            raise AssertionError(f"draw {seed}: {error}\n{call.arguments}") from error


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("ranks", first([2, 3, 1, 4], 1, 2))
def test_random_calls_are_exact_on_a_ring_or_refused_by_name(gloo, name, ranks):
    assert_exact_or_refused(name, FEW, gloo(ranks, over_a_ring, name, FEW))


@pytest.mark.parametrize("name", DRAWS)
def test_random_calls_are_exact_on_one_device_or_refused_by_name(name):
    assert_exact_or_refused(name, SOME, [over_a_ring(None, name, list(SOME))])


@pytest.mark.campaign
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("ranks", [None, 2, 4])
def test_three_hundred_calls_are_exact_or_refused_by_name(gloo, name, ranks):
    results = gloo(ranks, over_a_ring, name, ALL) if ranks else [over_a_ring(None, name, list(ALL))]
    assert_exact_or_refused(name, ALL, results)


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "flex_attention"])
@pytest.mark.parametrize("seeds", first([SOME, ALL], 1, 1, "campaign"), ids=len)
def test_our_exact_results_are_those_of_torchs_own_functions(monkeypatch, name, seeds):
    """To float64, so that our own bound is one of the distance to torch."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)  # it compiles once a shape
    for seed in seeds:
        call = draw(name, seed)
        if call.refused is None:
            exact = call.attention(plain=False)
            for x, theirs in originals(call).items():
                assert relative_error(theirs, exact[x]) < 1e-12, f"draw {seed}: {x}\n{call.arguments}"


@pytest.mark.parametrize("name", DRAWS)
def test_most_draws_are_computed_and_every_refusal_is_drawn(name):
    draws = [draw(name, seed) for seed in ALL[:200]]
    computed = [call for call in draws if not call.refused]
    assert len(computed) > 0.6 * len(draws)
    assert {call.dtype for call in computed} == set(DTYPES)
    assert len({call.refused for call in draws}) > len(REFUSED_ALWAYS[name])
    refused = "\n".join(call.refused or "" for call in draws)
    assert [words for words in REFUSED_ALWAYS[name] if words not in refused] == []


def test_return_attn_probs_gives_lse_and_an_empty_mask_as_flash_attn():
    q, k, v = torch.randn(3, 2, 9, 2, 8, dtype=torch.bfloat16)
    expected = ring_attention(q, k, v, layout="contiguous", return_lse=True)
    out, lse, mask = functional.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1].transpose(1, 2))
    ends = torch.tensor([0, 9])
    packed = partial(functional.flash_attn_varlen_func, q[0], k[0], v[0], ends, ends, 9, 9, causal=True, return_attn_probs=True)
    assert all(map(torch.equal, packed(), (out[0], lse[0], mask)))
    assert (lse.dtype, mask.dtype, mask.shape) == (torch.float32, torch.bfloat16, (0,))
    with pytest.raises(ValueError, match=r"return_attn_probs=True with dropout asks for S_dmask, .* never made: leave it out"):
        packed(dropout_p=0.5, dropout_seed=3)


OPTIONS = (0.0, 0.3, True, (3, 0), 2.0, None, False, True)
"""From dropout_p to return_attn_probs, in the order of flash_attn 2.8.4."""


@pytest.mark.parametrize("rows", [(2,), ()], ids=["batch", "varlen"])
def test_packed_arrays_are_the_call_on_their_parts_and_get_its_gradients(rows):
    qkv = torch.randn(*rows, 9, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    ends = () if rows else (torch.tensor([0, 4, 4, 9]),)
    name = "" if rows else "varlen_"
    expected = getattr(functional, f"flash_attn_{name}func")(*qkv.unbind(-3), *ends * 2, *[6] * (2 * len(ends)), *OPTIONS)
    cotangents = [torch.randn_like(x) for x in expected[:2]]
    gradient = torch.autograd.grad(expected[:2], qkv, cotangents)[0]
    together = getattr(functional, f"flash_attn_{name}qkvpacked_func")(qkv, *ends, *[6] * len(ends), *OPTIONS)
    kv = qkv[..., 1:, :, :].detach().requires_grad_()
    q = qkv[..., 0, :, :].detach().requires_grad_()
    apart = getattr(functional, f"flash_attn_{name}kvpacked_func")(q, kv, *ends * 2, *[6] * (2 * len(ends)), *OPTIONS)
    for got in (together, apart):
        assert all(map(torch.equal, got, expected))
    assert torch.equal(torch.autograd.grad(together[:2], qkv, cotangents)[0], gradient)
    dq, dkv = torch.autograd.grad(apart[:2], (q, kv), cotangents)
    assert torch.equal(torch.cat([dq.unsqueeze(-3), dkv], -3), gradient)


def test_packed_arrays_of_another_shape_on_one_rank_are_an_error_on_all(gloo):
    first, second = gloo(2, message_of_packed)
    assert first == second
    assert first.startswith("rank 1: kv must be a dense torch.Tensor [batch, tokens, 2, heads, head_dim]")


def message_of_packed(group: Group) -> str:
    assert group is not None
    kv = torch.ones(1, 4, 2 + group.rank(), 2, 8)
    with pytest.raises(ValueError, match="kv must be") as caught:
        functional.flash_attn_kvpacked_func(torch.ones(1, 4, 2, 8), kv, group=group)
    return str(caught.value)


FLASH = "return_attn_probs", "dropout_p", "window_size", "deterministic", "softcap", "alibi_slopes without", "alibi_slopes need"
REFUSED_ALWAYS = {
    "flash_attn_func": (*FLASH, "flash_attn computes another window"),
    "flash_attn_varlen_func": (*FLASH, "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "block_table"),
    "scaled_dot_product_attention": (
        "differs between heads",
        "neither a band",
        "adds numbers",
        "dropout_p",
        "enable_gqa",
        "is_causal",
    ),
    "flex_attention": (
        "differs between heads",
        "neither a band",
        "score_mod",
        "traced",
        "kernel_options",
        "block_mask is for",
        "aux",
    ),
}
"""Words of the refusals that must be drawn."""
