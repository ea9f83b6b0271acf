"""Tests of the parts of transformers under a ring: its masks are told apart, its interfaces are those that ours expects."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, PreTrainedConfig, masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from ring_attn_core.masks import causal, full, sliding_window
from ring_attn_torch.transformers import attention, masks
from ring_attn_torch.transformers.cache import CachedCall, RingCache
from ring_attn_torch.transformers.documents import DocumentBounds, documents_of
from ring_attn_torch.transformers.masks import CallRing, Pattern, candidates, fits, intervals
from ring_attn_torch.transformers.shards import GlobalBatch, ends_of_blocks


def test_documents_begin_where_positions_begin_again_and_padding_sees_nothing():
    positions = torch.tensor([[0, 1, 2, 0, 1, 5], [0, 1, 2, 3, 4, 5]])
    extents = documents_of(positions, None, None, 6).extents
    assert extents is not None
    assert extents.tolist() == [[[0, 3]] * 3 + [[3, 5]] * 2 + [[5, 6]], [[0, 6]] * 6]
    present = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]]).bool()
    extents = documents_of(positions, present, None, 6).extents
    assert extents is not None
    assert extents.tolist() == [[[0, 3]] * 3 + [[3, 6]] * 3, [[0, 0]] * 2 + [[2, 5]] * 3 + [[0, 0]]]
    hole = documents_of(None, torch.tensor([[1, 0, 1]]).bool(), None, 3)
    assert hole.extents is None
    assert hole.key_mask is not None
    assert documents_of(positions[1:], torch.ones(1, 6).bool(), None, 6) == documents_of(None, None, None, 6)
    assert ends_of_blocks(torch.tensor([[1, 1, 0, 1, 0, 1]]).bool()).tolist() == [[2, 2, 0, 4, 0, 6]]


@pytest.mark.parametrize("tokens", [3, 9, 40])
def test_transformers_masks_are_told_apart(tokens: int):
    made = {
        "causal": (masking_utils.causal_mask_function, None, False, None),
        "full": (masking_utils.bidirectional_mask_function, None, True, None),
        "window": (masking_utils.sliding_window_causal_mask_function(5), 5, False, None),
        "both": (masking_utils.sliding_window_bidirectional_mask_function(5), 5, True, None),
        "chunks": (masking_utils.chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.long)), 5, False, 5),
    }
    wanted = {
        "causal": Pattern(causal()),
        "full": Pattern(full()),
        "window": Pattern(sliding_window(4)),
        "both": Pattern(sliding_window(5, after=5)),
        "chunks": Pattern(causal(), 5),
    }
    q, k = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    nought = torch.zeros(1, dtype=torch.long)
    for name, (function, size, both, chunk) in made.items():
        found = [p for p in candidates(size, both, chunk) if fits(p, function, size, tokens, torch.device("cpu"))]
        assert found[0] == wanted[name]
        assert torch.equal(found[0].visible(q, k), function(nought, nought, q, k).expand(tokens, tokens))
        whole = intervals(function, 1, tokens, torch.device("cpu"))
        assert whole is not None
        inside = (k >= whole[0, :, :1]) & (k < whole[0, :, 1:])
        assert torch.equal(inside, found[0].visible(q, k))
        others = [p for other, p in wanted.items() if other != name and tokens > 8]
        assert not any(fits(p, function, size, tokens, torch.device("cpu")) for p in others)


def test_documents_of_a_later_row_and_holes_are_seen_on_one_device():
    """Row 0 alone is causal, and keys between the first four and a window are hidden, though neighbours of any query are not."""
    call: Any = lambda function, size: masks.ring_mask(
        q_length=64, kv_length=64, mask_function=function, config=LlamaConfig(), local_size=size, batch_size=2
    )
    found = call(lambda b, h, q, k: (k <= q) & ((b == 0) | (q // 16 == k // 16)), None)
    tokens = torch.arange(64)
    begins = torch.stack([torch.zeros_like(tokens), tokens // 16 * 16])
    assert torch.equal(found.extents, torch.stack([begins, (tokens + 1).expand(2, -1)], -1).int())
    for size in (None, 8):
        with pytest.raises(ValueError, match="does not know a mask"):
            call(lambda b, h, q, k: (k <= q) & ((q - k < 8) | (k < 4)), size)


def test_a_mask_is_compared_with_the_pattern_that_it_is_taken_for():
    """A window as long as the chunks of the config is a window, and a prefix that all see is refused where it is sharded."""
    config: Any = LlamaConfig()
    config.attention_chunk_size = 5
    causally, window = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(5)
    prefix = masking_utils.or_masks(causally, lambda b, h, q, k: k < 4)
    whole = GlobalBatch(CallRing(), 1, 12, DocumentBounds(), device=torch.device("cpu"))
    call: Any = lambda function, size: masks.ring_mask(
        q_length=12, kv_length=12, mask_function=function, config=config, local_size=size, batch_size=1
    )
    with masks.during(whole):
        assert call(causally, None).band == causal()
        assert call(window, 5).band == sliding_window(4)
        for function, size in ((prefix, None), (window, 4)):
            with pytest.raises(ValueError, match="does not know a mask of LlamaConfig: it is neither causal nor full"):
                call(function, size)


def test_a_cache_goes_on_with_causal_layers_alone():
    call = CachedCall(RingCache(CallRing(), 1), 1, None, [1], None, 1, device=torch.device("cpu"))
    assert call.mask_of(Pattern(sliding_window(4))).band.hi == 4
    for pattern in (Pattern(full()), Pattern(causal(), 5), Pattern(sliding_window(5, after=5))):
        with pytest.raises(ValueError, match="this layer sees chunks, or tokens after its own"):
            call.mask_of(pattern)


MASK_ARGUMENTS = {"attention_mask", "batch_size", "config", "device", "dtype", "kv_length", "kv_offset", "local_size"}
MASK_ARGUMENTS |= {"allow_is_bidirectional_skip", "allow_is_causal_skip", "mask_function", "q_length", "q_offset", "use_vmap"}


def test_the_interfaces_of_transformers_are_those_that_this_was_written_for():
    """A release that changes one of them fails here, not in somebody's training."""
    assert AttentionInterface()["ring"] is attention.ring_attention_forward
    assert AttentionMaskInterface()["ring"] is masks.ring_mask
    eager = inspect.signature(modeling_gpt_oss.eager_attention_forward).parameters
    assert list(eager)[:7] == ["module", "query", "key", "value", "attention_mask", "scaling", "dropout"]
    ours = inspect.signature(attention.ring_attention_forward).parameters
    sdpa = inspect.signature(AttentionInterface()["sdpa"]).parameters
    unknown = set(sdpa) - set(ours) - attention.IGNORED - {"kwargs", "position_bias", "cache"}
    assert unknown == set(), "a new argument: honour it, refuse it, or list it as one that says nothing new"
    source = inspect.getsource(modeling_llama.LlamaAttention.forward)
    assert "ALL_ATTENTION_FUNCTIONS.get_interface(" in source
    made = {
        name: inspect.getsource(getattr(masking_utils, name))
        for name in vars(masking_utils)
        if re.match(r"create_.*_mask$", name)
    }
    assert {name for name, text in made.items() if "mask_interface(" in text} == {
        "create_bidirectional_mask",
        "create_bidirectional_sliding_window_mask",
        "create_causal_mask",
        "create_chunked_causal_mask",
        "create_sliding_window_causal_mask",
    }
    for name, text in made.items():
        if "mask_interface(" in text:
            passed = set(re.findall(r"^        (\w+)=", text.split("= mask_interface(")[1].split("\n    )")[0], re.M))
            assert passed <= MASK_ARGUMENTS, "a new argument: honour it, or list it as one that says nothing new"
            assert {"batch_size", "q_length", "kv_length", "mask_function", "attention_mask", "config", "use_vmap"} <= passed
            assert ("local_size" in passed) == ("sliding" in name or "chunked" in name)
            assert ("allow_is_bidirectional_skip" in passed) == ("bidirectional" in name)
    assert "_gradient_checkpointing_func(partial(" in inspect.getsource(GradientCheckpointingLayer)
    assert "_attn_implementation" in dir(PreTrainedConfig)
