"""KVCache and prefill in JAX: stories of requests against a model, one token at a time."""

from __future__ import annotations

import pytest

from ..support.caches import check
from ..support.stories import CHOSEN, REST
from .caches import play


@pytest.mark.parametrize("story", CHOSEN, ids=str)
def test_every_rank_holds_what_the_model_says_and_prefill_is_attention_over_the_whole_request(story):
    check(story, play(story))


@pytest.mark.full
@pytest.mark.parametrize("story", REST, ids=str)
def test_the_other_stories_too(story):
    check(story, play(story))
