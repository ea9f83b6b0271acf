"""FlashAttention's tests, of an sdist or a checkout, on CPUs: a few cases of each test, drawn by a seed.

Their dtypes, shapes and tolerances stand. The text has "cpu" in place of "cuda", and is told that it runs on sm_80.
"""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn_torch import functional

from .in_torch import attend
from .one import read

DRAWN = 10
LONGEST = 300  # a case of 1,024 tokens takes a minute on 2 cores


def attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, window_size: Any = (-1, -1), **arguments: Any) -> Any:
    window = tuple(int(side) for side in window_size)  # the tests pass a tensor
    return attend(functional.flash_attn_func, (q, k, v), 1, dropout_p=dropout_p, window_size=window, **arguments)


def varlen(q: Tensor, k: Tensor, v: Tensor, *ends: Any, dropout_p: float = 0.0, window_size: Any = (-1, -1), **rest: Any) -> Any:
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p"
    arguments = {"dropout_p": dropout_p} | dict(zip(names, ends, strict=False)) | rest
    window = tuple(int(side) for side in window_size)
    return attend(functional.flash_attn_varlen_func, (q, k, v), 0, window_size=window, **arguments)


def draw(test: Any) -> None:
    """Leave ``DRAWN`` of a test's cases, the same at each run. Its marks have the values of one or of several arguments each."""
    marks = [mark.args for mark in test.pytestmark if mark.name == "parametrize"]
    names = [name.strip() for words, _ in marks for name in words.split(",")]
    dice, cases = random.Random(test.__name__), []
    while len(cases) < DRAWN:
        case = [value for words, values in marks for value in _as_tuple(dice.choice(values), words)]
        lengths = [value for name, value in zip(names, case, strict=True) if name.startswith("seqlen")]
        if max(lengths, default=0) <= LONGEST:
            cases.append(tuple(case))
    test.pytestmark = [pytest.mark.parametrize(",".join(names), cases).mark]


def _as_tuple(value: Any, words: str) -> tuple[Any, ...]:
    return value if "," in words else (value,)


def module(name: str, **content: Any) -> None:
    sys.modules[name] = made = ModuleType(name)
    made.__dict__.update(content)


module(
    "flash_attn",
    flash_attn_func=attention,
    flash_attn_kvpacked_func=lambda q, kv, *others, **arguments: attention(q, *kv.unbind(2), *others, **arguments),
    flash_attn_qkvpacked_func=lambda qkv, *others, **arguments: attention(*qkv.unbind(2), *others, **arguments),
    flash_attn_varlen_func=varlen,
    flash_attn_varlen_kvpacked_func=lambda q, kv, *others, **arguments: varlen(q, *kv.unbind(1), *others, **arguments),
    flash_attn_varlen_qkvpacked_func=lambda qkv, ends, longest, *others, **arguments: varlen(
        *qkv.unbind(1), ends, ends, longest, longest, *others, **arguments
    ),
    flash_attn_with_kvcache=None,
)
module("flash_attn.flash_attn_interface", _get_block_size_n=lambda *_: 128, USE_TRITON_ROCM=False)
module("flash_attn.layers.rotary", apply_rotary_emb=None)
module("flash_attn.bert_padding")
exec(read("flash_attn/bert_padding.py"), sys.modules["flash_attn.bert_padding"].__dict__)
torch.cuda.get_device_capability = lambda *_: (8, 0)
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**40)  # type: ignore[assignment]
exec(read("tests/test_flash_attn.py", ('"cuda"', '"cpu"')))
for name in [name for name in globals() if name.startswith("test_")]:
    draw(globals()[name])
