"""KVCache and prefill in PyTorch: stories of requests against a model, one token at a time."""

from __future__ import annotations

import pytest

from ..support.caches import check
from ..support.stories import CHOSEN, REST
from .caches import on_rank


@pytest.mark.parametrize("story", [*CHOSEN, *REST], ids=str)
def test_every_rank_holds_what_the_model_says_and_prefill_is_attention_over_the_whole_request(gloo, story):
    results = gloo(story.ranks, on_rank, story)
    check(story, list(zip(*results, strict=True)))
