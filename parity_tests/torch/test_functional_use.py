"""The functions of functional as programs use them: compiled, with dropout, with masks that change, and with wrong arguments."""

# pyright: reportArgumentType=false

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import bias
from torch.nn.attention import flex_attention as flex

import ring_attn_torch
from ring_attn_torch import from_layout, functional, ring_attention, to_layout

from ..support.selection import first
from .functional import Group

FLASH = (
    "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap alibi_slopes "
    "deterministic return_attn_probs block_table",
)
"""The parameters of flash_attn 2.8.4, which is not installed here."""

RING = ["group", "layout", "length", "kv_length"]
ORIGINALS = {
    "flash_attn_func": FLASH[0].split(),
    "flash_attn_varlen_func": FLASH[1].split(),
    "scaled_dot_product_attention": ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"],
    "flex_attention": list(inspect.signature(flex.flex_attention).parameters),
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_signature_is_the_originals_with_the_ring_behind(name):
    ours = inspect.signature(getattr(functional, name)).parameters
    seed = [] if name == "flex_attention" else ["dropout_seed"]
    assert list(ours) == [*ORIGINALS[name], *RING, *seed]
    assert all(ours[x].kind is inspect.Parameter.KEYWORD_ONLY for x in [*RING, *seed])
    assert ring_attn_torch.functional is functional
    if name == "flex_attention":
        theirs = inspect.signature(flex.flex_attention).parameters
        assert {x: p.default for x, p in theirs.items()} == {x: ours[x].default for x in theirs}


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype) for _ in range(3)]


def test_scaled_dot_product_attention_compiles_whole():
    qkv = [x.transpose(1, 2).requires_grad_() for x in drawn(2, 13, 4, 8)]  # views that are not contiguous
    compiled = torch.compile(
        partial(functional.scaled_dot_product_attention, is_causal=True), fullgraph=True, backend="aot_eager"
    )
    out = compiled(*qkv)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*qkv, is_causal=True))
    for ours, theirs in zip(
        torch.autograd.grad(out.square().sum(), qkv),
        torch.autograd.grad(F.scaled_dot_product_attention(*qkv, is_causal=True).square().sum(), qkv),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.exhaustive
def test_the_functions_of_flash_attn_compile_whole():
    qkv = drawn(1, 13, 4, 8)
    ends = torch.tensor([0, 5, 13], dtype=torch.int32)
    once = partial(functional.flash_attn_func, causal=True, window_size=(3, 0), softcap=2.0)
    packed = lambda q, k, v: functional.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 8, 8, causal=True)
    for call in (once, packed):
        torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(*qkv), call(*qkv))


def test_arguments_that_torch_compile_hides_are_refused_by_name():
    qkv, mask = drawn(1, 2, 5, 4), torch.ones(5, 5, dtype=torch.bool)
    block_mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 5, "cpu")
    compiled = partial(torch.compile, backend="eager", fullgraph=True)
    for call, words in (
        (partial(functional.scaled_dot_product_attention, attn_mask=mask), "torch.compile hides what attn_mask holds"),
        (partial(functional.flex_attention, block_mask=block_mask), "block_mask is evaluated on the host"),
        (partial(functional.flex_attention, score_mod=functional.softcap(2.0)), "score_mod is read by tracing it"),
    ):
        with pytest.raises(Exception, match=words):
            compiled(call)(*qkv)


def test_dropout_is_that_of_ring_attention():
    q, k, v = drawn(2, 9, 2, 8)
    expected = ring_attention(q, k, v, layout="contiguous", dropout_rate=0.5, dropout_seed=3)
    dropped = {"dropout_p": 0.5, "dropout_seed": 3}
    assert torch.equal(functional.flash_attn_func(q, k, v, causal=True, **dropped), expected)
    heads = functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, **dropped)
    assert torch.equal(heads.transpose(1, 2), expected)
    ends = torch.tensor([0, 9])
    packed = functional.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 9, 9, causal=True, **dropped)
    assert torch.equal(packed, expected[0])
    whole = functional.flash_attn_func(q, k, v, causal=True)
    for nothing in (0, np.float32(0)):
        assert torch.equal(functional.flash_attn_func(q, k, v, causal=True, dropout_p=nothing), whole)
    with pytest.raises(ValueError, match=r"dropout_p must be a number, got Tensor of shape \[\]: pass a float"):
        functional.flash_attn_func(q, k, v, dropout_p=torch.tensor(0.0))


def test_tokens_after_the_last_document_have_out_0_and_change_nothing():
    q, k, v = drawn(1, 12, 2, 8)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    call = lambda: functional.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 5, 5)
    before = call()
    k[:, 9:] = v[:, 9:] = torch.nan
    assert torch.equal(call(), before)
    assert torch.equal(before[9:], torch.zeros(3, 2, 8))


def test_an_invalid_aux_request_is_refused():
    with pytest.raises(ValueError, match="return_aux must be an AuxRequest, got True"):
        functional.flex_attention(*drawn(1, 1, 4, 4), return_aux=True)


@pytest.mark.parametrize("flag", ["False", 1, None])
def test_a_flag_that_is_neither_true_nor_false_is_refused(flag):
    qkv = drawn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="is_causal must be True or False, got"):
        functional.scaled_dot_product_attention(*qkv, is_causal=flag)
    with pytest.raises(ValueError, match="enable_gqa must be True or False, got"):
        functional.scaled_dot_product_attention(*qkv, enable_gqa=flag)
    with pytest.raises(ValueError, match="causal must be True or False, got"):
        functional.flash_attn_func(*qkv, causal=flag)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_for_scaled_dot_product_attention_as_in_torch(compiled):
    q, k, v = (x.transpose(1, 2) for x in drawn(1, 6, 2, 8))
    ours = functional.scaled_dot_product_attention
    ours = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    with torch.autocast("cpu", torch.bfloat16):
        for values in (v, v.bfloat16()):
            theirs = F.scaled_dot_product_attention(q, k, values)
            assert ours(q, k, values).dtype == theirs.dtype == torch.bfloat16
            torch.testing.assert_close(ours(q, k, values), theirs, atol=2e-2, rtol=2e-2)
        assert ours(q.double(), k.double(), v.double()).dtype == torch.float64


@pytest.mark.parametrize("side", [2**31, 2**62, 2**63 - 1, 2**64])
def test_a_side_beyond_every_sequence_is_open(side):
    """Check packed documents, whose sums with positions would leave int64, and one sequence."""
    q, k, v = drawn(1, 12, 2, 8)
    ends, others = torch.tensor([0, 5, 12]), torch.tensor([0, 3, 12])
    packed = partial(functional.flash_attn_varlen_func, q[0], k[0], v[0], ends, others, 12, 12)
    once = partial(functional.flash_attn_func, q, k, v)
    for call in (packed, once):
        assert torch.equal(call(window_size=(side, side)), call())
        assert torch.equal(call(causal=True, window_size=(side, 0)), call(causal=True))


@pytest.mark.parametrize(("window", "refused"), [((2, -1), True), ((-1, 4), True), ((9, -1), False), ((2, 3), False)])
def test_a_window_that_flash_attn_computes_otherwise_than_it_documents_is_refused(window, refused):
    """Take more queries than keys: gpu/test_functional.py compares with flash_attn's own kernels."""
    (q, _, _), (k, v, _) = drawn(1, 9, 2, 8), drawn(1, 4, 2, 8)
    packed = partial(functional.flash_attn_varlen_func, cu_seqlens_q=torch.tensor([0, 9]), cu_seqlens_k=torch.tensor([0, 4]))
    once = partial(functional.flash_attn_func, q, k, v)
    for call in (partial(packed, q[0], k[0], v[0], max_seqlen_q=9, max_seqlen_k=4), once):
        if refused:
            with pytest.raises(ValueError, match="flash_attn computes another window"):
                call(window_size=window)
        else:
            assert call(window_size=window).isfinite().all()


@pytest.mark.parametrize("window", [(2, -1), (-1, 4), (2, 4)])
def test_a_window_is_refused_by_the_longest_document_and_not_by_max_seqlen(window):
    """Programs round max_seqlen up: no query here lies 4 tokens before its last one."""
    (q, _, _), (k, v, _) = drawn(6, 2, 8), drawn(8, 2, 8)
    ends = torch.tensor([0, 2, 6]), torch.tensor([0, 4, 8])
    exact, rounded = (functional.flash_attn_varlen_func(q, k, v, *ends, most, 4, window_size=window) for most in (4, 64))
    assert torch.equal(rounded, exact)


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (2, 3)}])
def test_without_keys_no_window_is_refused(options):
    q, k, v = drawn(1, 9, 2, 8)
    ends = torch.tensor([0, 9]), torch.tensor([0, 0])
    assert not functional.flash_attn_func(q, k[:, :0], v[:, :0], **options).any()
    assert not functional.flash_attn_varlen_func(q[0], k[0], v[0], *ends, 9, 0, **options).any()


@pytest.mark.parametrize("options", first([{"causal": True}, {"window_size": (2, 3)}]))
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_max_seqlen_may_come_from_cu_seqlens_inside_torch_compile(options):
    ends = torch.tensor([0, 5, 12])

    def call(q: Tensor, k: Tensor, v: Tensor, item: bool) -> Tensor:
        longest: Any = ends.diff().max()
        longest = longest.item() if item else longest
        return functional.flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, **options)

    qkv = drawn(12, 2, 8)
    for item in (False, True):
        compiled: Any = torch.compile(partial(call, item=item), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*qkv), call(qkv[0], qkv[1], qkv[2], item))


def test_max_seqlen_may_be_an_integer_tensor():
    q, k, v = drawn(12, 2, 8)
    ends = torch.tensor([0, 5, 12])
    call = partial(functional.flash_attn_varlen_func, q, k, v, ends, ends)
    assert torch.equal(call(torch.tensor(7), torch.tensor(7)), call(7, 7))
    with pytest.raises(ValueError, match="max_seqlen_q must be an int, at least the longest"):
        call(torch.tensor(6), torch.tensor(7))


def test_flex_attention_returns_lse_as_torch_does():
    qkv = drawn(2, 2, 6, 4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected: Any = flex.flex_attention(qkv[0], qkv[1], qkv[2], return_aux=flex.AuxRequest(lse=True))
    got = functional.flex_attention(*qkv, return_aux=flex.AuxRequest(lse=True))
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1].lse, expected[1].lse, check_dtype=False)
    assert got[1].max_scores is None


def test_slopes_that_torch_would_round_are_refused():
    slopes = torch.tensor([0.3, 0.7], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"score_mod has slopes of torch\.bfloat16"):
        functional.flex_attention(*drawn(1, 2, 4, 4), score_mod=functional.alibi(slopes))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attn_mask": torch.ones(1, 1, 4, 5)}, r"attn_mask must be whole, .* = \[1, 2, 4, 4\], got \[1, 1, 4, 5\]"),
        ({"attn_mask": torch.ones(4, 4, dtype=torch.int32)}, "attn_mask must be bool"),
        ({"attn_mask": [[True] * 4] * 4}, "attn_mask must be a tensor"),
        ({"attn_mask": bias.causal_lower_right(3, 4)}, "attn_mask is a CausalBias of 3 queries and 4 keys"),
        ({"attn_mask": torch.zeros(4, 4, requires_grad=True)}, "attn_mask requires a gradient"),
        ({"layout": "zigzagged"}, "unknown layout 'zigzagged'"),
        ({"length": 5}, "length=5 is more than"),
        ({"scale": "1"}, "scale must be"),
    ],
)
def test_wrong_arguments_of_scaled_dot_product_attention_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        functional.scaled_dot_product_attention(*drawn(1, 2, 4, 8), **arguments)


@pytest.mark.parametrize("name", ["flash_attn_func", "flex_attention", "scaled_dot_product_attention"])
def test_arrays_of_other_dimensions_are_named(name):
    q, k, v = drawn(2, 4, 8)
    with pytest.raises(ValueError, match=r"(q|query) must be \[batch, .*\], got shape \[2, 4, 8\]"):
        getattr(functional, name)(q, k, v)
    with pytest.raises(ValueError, match=r"(k|key) must be a dense torch\.Tensor"):
        getattr(functional, name)(q[None], np.zeros(3), v[None])


def test_a_wrong_mask_on_one_rank_is_an_error_on_all(gloo):
    messages = gloo(2, message_on_rank)
    assert messages[0] == messages[1]
    assert "rank 1: attn_mask is neither a band" in messages[0]


def message_on_rank(group: Group) -> str:
    assert group is not None
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[3, 3] = group.rank() == 0
    with pytest.raises(ValueError, match="attn_mask") as caught:
        functional.scaled_dot_product_attention(*drawn(1, 2, 4, 8), attn_mask=mask, group=group)
    return str(caught.value)


def test_later_tokens_change_nothing_on_any_rank(gloo):
    """Change all keys from the next one on under a window aligned to the bottom right: earlier queries keep their bits."""
    before, after = (gloo(4, aligned_on_rank, factor) for factor in (1.0, -3.0))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[:, :6], b[:, :6])
        assert (a[:, 6:] != b[:, 6:]).all()


def aligned_on_rank(group: Group, factor: float) -> np.ndarray:
    """out of 9 queries, the last of 21 tokens, whose keys from position 18 on are multiplied by ``factor``."""
    assert group is not None
    ranks, rank = group.size(), group.rank()
    q, k, v = drawn(1, 21, 2, 8)
    k[:, 18:], v[:, 18:] = k[:, 18:] * factor, v[:, 18:] * factor
    own = lambda x: to_layout(x, "striped", ranks).chunk(ranks, 1)[rank]
    out = functional.flash_attn_func(
        *map(own, (q[:, 12:], k, v)), causal=True, group=group, layout="striped", length=9, kv_length=21
    )
    shards: list[Any] = [torch.empty_like(out) for _ in range(ranks)]
    torch.distributed.all_gather(shards, out, group)
    return from_layout(torch.cat(shards, 1), "striped", ranks, 9).numpy()
