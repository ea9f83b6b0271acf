"""MultiheadAttention over a ring is torch's own, or says by name what it refuses; DilatedAttention has its form."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn_torch import DilatedAttention, MultiheadAttention, causal, from_layout, ring_attention, to_layout

from ..support.selection import first
from ..support.spawn import PerRank
from .dilated_layer import WHOLE
from .multihead import Group, draw, over_a_ring, torchs_own

SEEDS = list(range(64))
SIZES = {"embed_dim": 12, "num_heads": 2, "batch_first": True}
KINDS: dict[Any, dict[str, Any]] = {MultiheadAttention: {}, DilatedAttention: WHOLE}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", first([2, 1, 4]))
def test_random_calls_are_torchs_own_or_refused_by_name(gloo, ranks):
    results = gloo(ranks, over_a_ring, SEEDS[::2])
    for seed, *of_ranks in zip(SEEDS[::2], *results, strict=True):
        drawn, got = draw(seed), of_ranks[0]
        if drawn.refused or isinstance(got, str):
            assert drawn.refused, f"draw {seed} is refused: {got}"
            assert all(isinstance(x, str) for x in of_ranks), f"draw {seed} is not refused: {drawn.refused}"
            for message in of_ranks:
                assert_says(message, drawn.refused)
            continue
        expected = torchs_own(drawn)
        assert got.keys() == expected.keys()
        for name, x in expected.items():
            distance = (got[name] - x).norm() / max(x.norm(), 0.01)
            assert distance < 1e-11, f"draw {seed}: {name} differs by {distance:.3g}\n{drawn}"


def assert_says(message: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        raise ValueError(message)


def test_most_draws_are_computed_and_every_refusal_is_drawn():
    """Never refused: self-attention with padding, causal or not, and cross-attention."""
    draws = [draw(seed) for seed in SEEDS]
    computed = [drawn for drawn in draws if not drawn.refused]
    assert len(computed) > 0.7 * len(draws)
    assert len({drawn.refused for drawn in draws}) == 5
    assert any(drawn.query is drawn.key and drawn.called.keys() >= {"attn_mask", "key_padding_mask"} for drawn in computed)
    assert any(drawn.made["kdim"] and drawn.called.get("is_causal") for drawn in computed)
    assert {drawn.query.ndim for drawn in computed} == {2, 3}


@pytest.mark.parametrize("kind", KINDS)
def test_the_signatures_are_torchs_with_more_behind(kind):
    for name in ("__init__", "forward"):
        ours, theirs = (inspect.signature(getattr(of, name)).parameters for of in (kind, nn.MultiheadAttention))
        assert list(ours)[: len(theirs)] == list(theirs)
        differing = {p.name for p in theirs.values() if p.default != ours[p.name].default}
        assert differing == ({"need_weights"} if name == "forward" else set())
        assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_state_dict_goes_in_and_comes_back_equal(kind):
    made = {"kdim": 5, "vdim": 7, "add_bias_kv": True}
    theirs, ours = nn.MultiheadAttention(12, 2, **made), kind(12, 2, **made, **KINDS[kind])
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(x, theirs.state_dict()[name]) for name, x in ours.state_dict().items())
    for other in (theirs, MultiheadAttention(12, 2, **made)):
        other.load_state_dict(ours.state_dict())
    torch.manual_seed(1)
    started = kind(**SIZES, **KINDS[kind]).state_dict()
    torch.manual_seed(1)
    assert all(torch.equal(x, started[name]) for name, x in nn.MultiheadAttention(**SIZES).state_dict().items())


def test_causal_needs_no_mask_and_its_padding_is_told_by_the_length():
    module, x = MultiheadAttention(**SIZES, layout="contiguous"), torch.randn(2, 7, 12)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected, _ = nn.MultiheadAttention.forward(as_torchs(module), x[:, :5], x[:, :5], x[:, :5], attn_mask=mask)
    out, _ = module(x, x, x, is_causal=True, length=5)
    torch.testing.assert_close(out[:, :5], expected)
    assert torch.equal(out[:, 5:], module.out_proj.bias.expand(2, 2, 12))


def as_torchs(module: MultiheadAttention) -> nn.MultiheadAttention:
    """torch's own with the same weights."""
    theirs = nn.MultiheadAttention(**SIZES)
    theirs.load_state_dict(module.state_dict())
    return theirs


def test_a_query_that_sees_no_key_attends_to_nothing():
    module, x = MultiheadAttention(**SIZES), torch.randn(2, 6, 12, requires_grad=True)
    out, _ = module(x, x, x, torch.tensor([[True] * 6, [False] * 6]))
    assert torch.equal(out[0], module.out_proj.bias.expand(6, 12))
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[0], torch.zeros(6, 12))
    assert x.grad[1].norm() > 0


def test_dropout_is_the_same_on_any_ring_and_seeded_as_torch_is(gloo):
    alone = dropped_on_rank(None, 5)
    for ranks in (2, 4):
        for got in gloo(ranks, dropped_on_rank, 5):
            torch.testing.assert_close(got, alone)
    unseeded = [gloo(2, dropped_on_rank, None, seed)[0] for seed in (1, 1, 2)]
    assert torch.equal(unseeded[0], unseeded[1])
    assert not torch.equal(unseeded[0], unseeded[2])


def dropped_on_rank(group: Group, dropout_seed: int | None, generator: int = 0) -> Tensor:
    """The gathered output of a training call with dropout. Only rank 0's generator is seeded alike."""
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    torch.manual_seed(0)
    module, x = MultiheadAttention(**SIZES, dropout=0.4, group=group), torch.randn(2, 16, 12)
    torch.manual_seed(generator + 10 * rank)
    x = to_layout(x, "zigzag", ranks).chunk(ranks, 1)[rank]
    out, _ = module(x, x, x, dropout_seed=dropout_seed)
    assert (out - module.eval()(x, x, x)[0]).norm() > 0.1 * out.norm()
    shards = [torch.empty_like(out) for _ in range(ranks)]
    if group is not None:
        dist.all_gather(shards, out.detach().contiguous(), group=group)
    return from_layout(torch.cat(shards if group else [out.detach()], 1), "zigzag", ranks, 16)


def test_dropout_is_ring_attentions():
    module, x = MultiheadAttention(**SIZES, dropout=0.4), torch.randn(2, 8, 12)
    out, _ = module(x, x, x, is_causal=True, dropout_seed=7)
    q, k, v = (
        (x @ w.T + b).unflatten(-1, (2, 6))
        for w, b in zip(module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True)
    )
    attended = ring_attention(q, k, v, mask=causal(), dropout_rate=0.4, dropout_seed=7)
    torch.testing.assert_close(out, module.out_proj(attended.flatten(2)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad", [True, False])
def test_torchs_encoder_layer_runs_over_the_ring(gloo, grad, kind):
    torch.manual_seed(0)
    x = torch.randn(2, 16, 12)
    layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(16)
    expected = layer(x, src_mask=mask, is_causal=True).detach()
    for rank, got in enumerate(gloo(4, encoded_on_rank, layer.state_dict(), x, mask, grad, kind)):
        layout = "contiguous" if kind is DilatedAttention else "zigzag"
        torch.testing.assert_close(got, to_layout(expected, layout, 4).chunk(4, 1)[rank])


def encoded_on_rank(group: Group, state: dict[str, Tensor], x: Tensor, mask: Tensor, grad: bool, kind: Any) -> Tensor:
    """This rank's output of an encoder layer that was copied, in training with gradients and in inference without."""
    assert group is not None
    layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)
    layer.self_attn = kind(**SIZES, **KINDS[kind], group=group)
    layer.load_state_dict(state)
    x = to_layout(x, "contiguous" if kind is DilatedAttention else "zigzag", 4).chunk(4, 1)[group.rank()]
    with torch.set_grad_enabled(grad):
        return copy.deepcopy(layer).train(grad)(x, src_mask=mask, is_causal=True).detach()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"need_weights": True}, "need_weights=True asks"),
        ({"attn_mask": torch.zeros(8, 8, dtype=torch.bool), "is_causal": True}, "is_causal=True beside an attn_mask that is not"),
        ({"attn_mask": torch.zeros(8, 7, dtype=torch.bool)}, r"attn_mask must be whole, .*, got \[8, 7\] for shards of 8"),
        ({"attn_mask": torch.zeros(8, 8, dtype=torch.bool), "length": 7}, "attn_mask must be whole, .* length=7"),
        ({"attn_mask": torch.zeros(3, 8, 8)}, r"\[batch \* heads = 4, queries, keys\], got \[3, 8, 8\]"),
        ({"attn_mask": torch.zeros(8, 8, dtype=torch.int32)}, "attn_mask must be bool, .* got torch.int32"),
        ({"key_padding_mask": torch.zeros(8, dtype=torch.bool)}, r"key_padding_mask must be \[2, 8\], .*, got \[8\]"),
        ({"key_padding_mask": torch.full((2, 8), -1e9)}, "key_padding_mask adds numbers other than 0 and -inf"),
        ({"length": 9}, "length"),
    ],
)
def test_calls_that_do_not_fit_are_refused(arguments, words):
    x = torch.randn(2, 8, 12)
    with pytest.raises(ValueError, match=words):
        MultiheadAttention(**SIZES, layout="contiguous")(x, x, x, **arguments)


def test_inputs_that_do_not_fit_are_refused():
    module, x = MultiheadAttention(**SIZES), torch.randn(2, 8, 12)
    with pytest.raises(ValueError, match=r"query is torch\.float64 and the weights are torch.float32"):
        module(x.double(), x, x)
    with pytest.raises(ValueError, match=r"key must be \[batch, tokens, 12\], .* got \[2, 8, 11\]"):
        module(x, x[..., 1:], x)
    with pytest.raises(ValueError, match="must have the same tokens and batch"):
        module(x, x, x[:, 1:])
    with pytest.raises(ValueError, match=r"value must be a dense torch\.Tensor, .*, got list"):
        module(x, x, [1])
    for dtype in (torch.float64, torch.bfloat16):
        module.in_proj_bias = nn.Parameter(torch.zeros(36, dtype=dtype))
        with pytest.raises(
            ValueError, match=rf"weights must have one dtype, got .*in_proj_bias {dtype}, out_proj.*: cast the module"
        ):
            module(x, x, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x, x, x)[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="from 0 to below 1, got 1"):
        MultiheadAttention(**SIZES, dropout=1.0)
    with pytest.raises(ValueError, match=r"add_bias_kv with dropout=0.1 does not work while training"):
        MultiheadAttention(**SIZES, dropout=0.1, add_bias_kv=True)(x, x, x)


def test_all_ranks_refuse_an_attn_mask_that_one_refuses(gloo):
    mask = torch.zeros(8, 8)
    gloo.refuse("^rank 1: attn_mask adds numbers other than 0", 2, masked_on_rank, PerRank(mask, mask + 1))


def masked_on_rank(group: Group, mask: Tensor) -> Tensor:
    x = torch.ones(3, 4, 12)
    return MultiheadAttention(**SIZES, group=group)(x, x, x, attn_mask=mask)[0].detach()


def test_a_compiled_call_needs_no_break_of_the_graph():
    module, x = MultiheadAttention(**SIZES), torch.randn(2, 8, 12)
    padding = torch.arange(8).expand(2, 8) > 5
    for arguments in (
        {"is_causal": True, "key_padding_mask": padding},
        {"key_padding_mask": torch.where(padding, -torch.inf, 0)},
    ):
        compiled = torch.compile(module, backend="eager", fullgraph=True)(x, x, x, **arguments)[0]
        torch.testing.assert_close(compiled, module(x, x, x, **arguments)[0])
