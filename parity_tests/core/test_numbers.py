"""NumPy scalars where a call takes numbers: records hold Python numbers, equal and hashed as if those had been given."""

from __future__ import annotations

import numpy as np
import pytest

from ring_attn_core import Band, RingPlan, causal
from ring_attn_core.cache.spec import CacheSizes
from ring_attn_core.model.config import AttentionConfig, TransformerConfig
from ring_attn_core.model.rotary import Rotary, YaRN
from ring_attn_core.problem.decode import Decode
from ring_attn_core.problem.options import Options
from ring_attn_core.sampling import Sampling
from ring_attn_core.variants.dilated import Patterns
from ring_attn_core.variants.summary import SummaryOptions

DECODE = {"q_shape": (1, 1, 2, 4), "k_shape": (1, 3, 2, 4), "v_shape": (1, 3, 2, 4), "dtypes": ("float32",) * 3}

MAKERS = {
    "options": lambda i, f: Options(
        mask=Band(i(0), i(3)), length=i(13), kv_length=i(12), scale=f(0.5), softcap=f(2), dropout_rate=f(0.25)
    ),
    "plan": lambda i, f: RingPlan("zigzag", causal(), i(2), i(8), length=i(13)),
    "decode": lambda i, f: Decode(**DECODE, window=i(3), scale=f(0.5), softcap=f(2)),
    "summary": lambda i, f: SummaryOptions(block=i(4), window=i(3), summaries=i(2), scale=f(0.5), length=i(13)),
    "patterns": lambda i, f: Patterns([i(4), i(8)], (i(1), i(2))).checked(2),
    "attention": lambda i, f: AttentionConfig(dim=i(16), heads=i(4), kv_heads=i(2), softcap=f(2), eps=f(0.5)),
    "transformer": lambda i, f: TransformerConfig(
        vocab=i(11), dim=i(16), depth=i(1), heads=i(4), rotary_base=f(8), windows=[i(3)]
    ),
    "rotary": lambda i, f: Rotary(f(1024), YaRN(f(2), i(16), fast=f(8))),
    "sizes": lambda i, f: CacheSizes(i(2), i(2), i(4)),
    "sampling": lambda i, f: Sampling(temperature=f(0.5), top_k=i(3), top_p=f(0.5), seed=i(7)),
}


@pytest.mark.parametrize(
    "numpys", [(np.int64, np.float32), (np.uint8, np.float16), (np.array, lambda x: np.array(float(x)))], ids=["64", "8", "0-d"]
)
@pytest.mark.parametrize("name", MAKERS)
def test_numpy_scalars_make_the_record_that_python_numbers_make(name, numpys):
    ours, theirs = MAKERS[name](int, float), MAKERS[name](*numpys)
    assert (ours, hash(ours), repr(ours)) == (theirs, hash(theirs), repr(theirs))


def test_numpy_scalars_reach_an_op_as_the_same_text():
    ours, theirs = MAKERS["options"](int, float), MAKERS["options"](np.int64, np.float32)
    assert (ours.text, ours.counts) == (theirs.text, theirs.counts)


@pytest.mark.parametrize("wrong", [np.bool_(True), np.ones(2), np.float32(1.5), np.complex64(1)], ids=repr)
def test_an_invalid_number_of_tokens_stays_refused(wrong):
    with pytest.raises(ValueError, match="length must be int or None"):
        Options(length=wrong)
