"""Models of transformers on a GPU, in bfloat16 through the kernels, against eager attention in float64 on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.13")
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3Config

from ring_attn_torch.transformers import sequence_parallel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
CONFIGS = {
    "full": Qwen3Config(**SIZES, **HEADS),
    "sinks and windows": GptOssConfig(**SIZES, **HEADS, sliding_window=37, num_local_experts=4, num_experts_per_tok=4),
}
"""Every token goes through all experts: which ones it takes would hang on the last bits."""


def made(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager", experts_implementation="eager").eval()


def batch(length: int = 301) -> dict[str, torch.Tensor]:
    """A row of three packed documents, and labels for some of it."""
    ids = torch.randint(300, (1, length), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in (100, 37, length - 137)])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions < 5, -100)}


def gradients(model: Any, device: str, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = model.to(device)
    loss = model(**{name: x.to(device) for name, x in given.items()}, use_cache=False).loss  # with one eager parts no documents
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {"loss": loss.detach()}
    return {name: x.double().cpu() for name, x in found.items()}


@pytest.mark.parametrize("chunk", [None, 100])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_eager_attention(name, chunk):
    model = made(name)
    if name == "sinks and windows":  # transformers parts packed documents of gpt-oss nowhere: one document
        given = {key: x for key, x in batch().items() if key != "position_ids"}
    else:
        given = batch()
    truth = gradients(copy.deepcopy(model).double(), "cpu", given)
    naive = gradients(copy.deepcopy(model).bfloat16(), "cuda", given)
    ours = copy.deepcopy(model).bfloat16().cuda()
    with sequence_parallel(ours, loss_chunk=chunk):
        got = gradients(ours, "cuda", given)
    assert got.keys() == truth.keys()
    for key, x in truth.items():
        error, others = ((of[key] - x).norm() / x.norm() for of in (got, naive))
        assert error <= 2 * others + 2**-8, key


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_that_of_the_whole_forward(name):
    """In float32, in which no choice of a random model is as close as the rounding."""
    model, ids = made(name).cuda(), batch(150)["input_ids"].cuda()
    with sequence_parallel(model):
        text = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None)
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(input_ids=text).logits[:, ids.shape[1] - 1 : -1]
    assert torch.equal(text[:, ids.shape[1] :], logits.argmax(-1))
