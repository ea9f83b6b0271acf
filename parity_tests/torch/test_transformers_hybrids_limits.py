"""Tests of the limits of hybrid models of transformers over a ring: calls beyond them are refused, calls at them run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import sum_gradients
from ring_attn_torch.recurrence.runs import Where
from ring_attn_torch.transformers import mixers

from .hugging_face import SMALL, in_float64
from .test_transformers_refusals import message_of

needs_hybrids = pytest.mark.skipif(Version(transformers.__version__) < mixers.OLDEST_HYBRIDS, reason="no hybrid model runs")


@pytest.fixture
def old_release(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    mixers.functions_of.cache_clear()
    monkeypatch.setattr(mixers.transformers, "__version__", "5.14.0")
    yield
    mixers.functions_of.cache_clear()


def test_a_release_before_the_first_with_hybrids_is_refused_and_its_modules_stay_as_they_are(old_release: None):
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    config = transformers.Qwen3NextConfig(**SMALL, num_experts=2)
    before, model = dict(vars(modeling)), transformers.Qwen3NextForCausalLM(config)
    tries: tuple[Any, ...] = config, model
    for refused in tries:
        message = message_of(lambda refused=refused: hf.enable(refused))
        assert "run from transformers 5.15 on" in message
        assert "this is 5.14.0" in message
    assert not mixers.take_over_mixers(model)
    assert vars(modeling) == before


@pytest.mark.parametrize("code", ["self.causal_conv1d_fn(x)", "causal_conv1d_fn(x)"])
@pytest.mark.parametrize("function", [None, len])
def test_a_mixer_calls_a_global_function(monkeypatch: pytest.MonkeyPatch, code: str, function: Any):
    monkeypatch.setattr(mixers.transformers, "__version__", "5.15.0")
    scope: dict[str, Any] = {"__name__": "transformers.models.one", "causal_conv1d_fn": function}
    exec(f"def forward(self, x):\n    return {code}", scope)
    called = mixers.functions_of(type("One", (nn.Module,), {"forward": scope["forward"]}))
    assert bool(called) == (function is len and "self" not in code)


@needs_hybrids
def test_a_state_space_is_as_wide_as_transformers_own_before_the_norm():
    from transformers.models.mamba2 import modeling_mamba2 as modeling

    x, dt, B, C = (torch.randn(1, 8, *dims).bfloat16() for dims in ((4, 8), (4,), (2, 4), (2, 4)))
    given = {"D": torch.ones(4), "dt_softplus": True}
    want = getattr(modeling.mamba2_chunk_scan, "__wrapped__", modeling.mamba2_chunk_scan)(x, dt, -torch.ones(4), B, C, 4, **given)
    where = Where(None, "contiguous", 8)
    got = mixers.FUNCTIONS["mamba2_chunk_scan"](where, x, dt, -torch.ones(4), B, C, **given)
    assert got.dtype == want.dtype == torch.float32
    assert relative_error(got.numpy(), want.numpy()) < 1e-2


@needs_hybrids
@pytest.mark.slow
def test_padding_in_shards_of_one_token_is_refused_and_layers_are_judged_by_a_later_call(four: Any):
    want = [short(None, tokens) for tokens in (4, 8)]
    for got in four(4, shorts):
        assert abs(got[0] - want[0]) < 1e-13 * want[0]
        assert "attention_mask has padding, and each of 4 ranks one token of 4, for which linear layers of" in got[1]
        assert abs(got[2] - want[1]) < 1e-13 * want[1]
        assert "never call attn_implementation, model.layers.2 (NemotronHBlock): each rank" in got[3]


def short(group: Any, tokens: int, padding: int = 0) -> float:
    from .test_transformers_hybrids import make

    model, ids = make("nemotron_h"), torch.arange(2 * tokens).view(2, -1) + 3
    mask = (torch.arange(tokens) >= torch.tensor([[padding], [0]])).long()
    given = {"input_ids": ids, "labels": ids, "attention_mask": mask, "use_cache": False}
    with in_float64():
        if group is None:
            return model(**given).loss.item()
        with hf.sequence_parallel(model, group, "contiguous"):
            return model(**given).loss.item()


def shorts(group: Any) -> list[Any]:
    return [short(group, 4), message_of(lambda: short(group, 4, 2)), short(group, 8), judged_later(group)]


class Mixes(nn.Module):
    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states.cumsum(1)


def judged_later(group: Any) -> str:
    from .test_transformers_hybrids import make

    model = make("nemotron_h")
    model.model.layers[2].mixer = Mixes()
    with hf.sequence_parallel(model, group):
        model(torch.ones(2, 4, dtype=torch.long))
        return message_of(lambda: model(torch.ones(2, 26, dtype=torch.long)))


@needs_hybrids
@pytest.mark.slow
def test_a_compiled_hybrid_with_activation_checkpointing_has_the_gradients_of_an_eager_one(four: Any):
    for loss, worst in four(2, compiled):
        assert loss < 1e-13
        assert worst < 1e-12


def compiled(group: Any) -> tuple[float, float]:
    import torch._dynamo

    from .test_transformers_hybrids import batch, make

    torch.set_grad_enabled(True)
    torch._dynamo.reset()
    losses, gradients = [], []
    for wrapped in (False, True):
        model = make("qwen3_next")
        model.gradient_checkpointing_enable()
        called: Any = torch.compile(model, backend="eager", dynamic=False) if wrapped else model
        with in_float64(), hf.sequence_parallel(called, group):
            loss = called(**batch("packed")).loss
            loss.backward()
        sum_gradients(model, group)
        losses.append(loss.item())
        gradients.append({name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    worst = max(relative_error(got, gradients[0][name]) for name, got in gradients[1].items() if gradients[0][name].any())
    return abs(losses[1] / losses[0] - 1), worst
