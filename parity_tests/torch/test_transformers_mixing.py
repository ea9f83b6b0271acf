"""Layers that mix tokens without asking the ring are refused by name, on every rank; layers that mix none are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch.transformers.models import layers_of

from .hugging_face import CLASSES, SMALL, Case, batch, make

pytestmark = pytest.mark.slow


class RunningMean(GradientCheckpointingLayer):
    """Adds to each token the mean of all tokens up to it, of the shard that it is given."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        counts = torch.arange(1, hidden_states.shape[1] + 1, device=hidden_states.device)
        return hidden_states + hidden_states.cumsum(1) / counts[:, None]


class TokenByToken(GradientCheckpointingLayer):
    """An MLP alone, with dropout, as layers of models that have lost their attention to a search."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 40), nn.Linear(40, 32)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states + self.down(nn.functional.dropout(self.up(hidden_states).relu(), 0.5, self.training))


def with_layer(layer: nn.Module) -> Any:
    """Return Llama with ``layer`` between its two layers."""
    model = make("llama", "float32", "sdpa")
    model.model.layers.insert(1, layer)
    model.config.num_hidden_layers = 3
    model.config.layer_types = ["full_attention"] * 3
    return model


def test_a_layer_that_mixes_tokens_within_its_shard_is_refused_by_name_on_every_rank(four: Any):
    for messages in four(2, refused):
        for message in messages:
            assert "LlamaForCausalLM has layers that mix tokens and never call attn_implementation" in message
            assert "model.layers.1 (RunningMean): each rank would compute them within its shard" in message


def refused(group: Any) -> list[str]:
    torch.manual_seed(0)
    model, messages = with_layer(RunningMean()), []
    for given in (batch(Case("llama")), {"input_ids": batch(Case("llama"))["input_ids"], "use_cache": True}):
        with torch.set_grad_enabled("labels" in given), hf.sequence_parallel(model, group):
            for _ in range(2):  # the second call too
                with pytest.raises(ValueError, match=r".") as error:
                    model(**given)
                messages.append(str(error.value))
    with hf.sequence_parallel(make("llama", "float32"), group):
        pass
    return messages


def test_a_layer_that_mixes_no_tokens_runs_and_keeps_its_mode(four: Any):
    torch.manual_seed(0)
    model, given = with_layer(TokenByToken()).eval(), batch(Case("llama"))
    want = model(**given, use_cache=False).logits.detach().numpy()
    for got, modes, hooks in four(2, token_by_token):
        assert relative_error(got, want) < 1e-5
        assert modes == [True] * 3
        assert hooks == 0


def token_by_token(group: Any) -> tuple[np.ndarray, list[bool], int]:
    torch.manual_seed(0)
    model, given = with_layer(TokenByToken()), batch(Case("llama"))
    with hf.sequence_parallel(model, group, gather_logits=True):
        model.train()(**given).loss.backward()
        layer = model.model.layers[1]
        modes = [module.training for module in layer.modules()]
        got = model.eval()(**given).logits.detach().numpy()
        return got, modes, len(layer._forward_hooks) + len(layer._forward_pre_hooks)


@pytest.mark.parametrize("name", CLASSES)
def test_the_layers_of_every_model_are_found(name: str):
    model = make(name, "float32")
    kinds = {type(layer).__name__ for layer in layers_of(model).values()}
    assert kinds
    assert all("Layer" in kind for kind in kinds), kinds


def test_a_list_of_layers_that_are_nothing_to_transformers_is_found():
    model = make("llama", "float32")
    model.model.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert list(layers_of(model)) == ["model.layers.0", "model.layers.1"]


def test_fourier_transforms_are_refused_when_the_model_is_met():
    config = transformers.FNetConfig(**{name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")})
    with pytest.raises(ValueError, match=r"FNetForMaskedLM mixes tokens by FNetBasicFourierTransform"):
        hf.enable(transformers.FNetForMaskedLM(config))
