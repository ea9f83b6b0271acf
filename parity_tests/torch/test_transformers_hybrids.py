"""Hybrid models of transformers over a ring have the loss and gradients of one process, of packed documents each by itself."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("transformers", minversion="5.15", reason="its mixers call functions that a ring can replace")

import torch
import transformers
from torch import nn

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import sum_gradients

from . import hugging_face
from .hugging_face import DOCUMENTS, HEADS, SMALL, STARTS, in_float64, without_cache
from .test_transformers_refusals import message_of

LOSS, GRADIENT = 1e-13, 1e-12
"""The largest relative errors in float64."""

GATED: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA2: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 8}
TWO: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", {**TWO, **GATED, **HEADS, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_5": ("Qwen3_5", {**TWO, **GATED, **HEADS}),
    "olmo_hybrid": ("OlmoHybrid", {**TWO, **GATED, "linear_num_key_heads": 4}),
    "kimi_linear": (
        "KimiLinear",
        {**TWO, "linear_head_dim": 8, "linear_num_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
        | {"num_key_value_heads": 4},
    ),
    "nemotron_h": (
        "NemotronH",
        {"layers_block_type": ["linear_attention", "full_attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 16, **HEADS}
        | {"ssm_state_size": 8, "n_groups": 2, "chunk_size": 8},
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {**TWO, **MAMBA2, "shared_intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "bamba": ("Bamba", {**MAMBA2, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", {**MAMBA2, "mamba_d_ssm": 64}),
    "mamba2": ("Mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8, "expand": 2}),
    "zamba2": (
        "Zamba2",
        {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_d_state": 8}
        | {"mamba_ngroups": 2, "chunk_size": 8, "adapter_rank": 4, "num_key_value_heads": 4},
    ),
    "jamba": (
        "Jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "num_experts": 2},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "mamba": ("Mamba", {"state_size": 4, "time_step_rank": 4}),
}
ATTENDS_NOT = ("mamba", "mamba2")


class Case(NamedTuple):
    """A batch for a model: ``kind`` plain, padded (right and left), holes or packed."""

    model: str
    kind: str = "plain"
    layout: str = "zigzag"
    checkpointed: bool = False


def make(name: str, **more: Any) -> Any:
    """Return a model with weights that are the same in every process, and with slow decay: a lost state is a large error."""
    family, own = MODELS[name]
    settings = {**SMALL, **own, **more}
    if name in ATTENDS_NOT:
        settings = {key: x for key, x in settings.items() if key not in ("num_attention_heads", "num_key_value_heads")}
    if name == "qwen3_5":
        config: Any = transformers.Qwen3_5TextConfig(**settings)
    else:
        config = getattr(transformers, f"{family}Config")(**settings)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for label, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if "A_log" in label:
                p.copy_(noise * 0.3 - 3)
            elif "dt_bias" in label or "dt_proj.bias" in label:
                p.copy_(noise * 0.3 - 1)
            else:
                p.copy_(noise * 0.25 if p.ndim > 1 or "bias" in label else 1 + 0.2 * noise)
    return model.double().train()


def batch(kind: str) -> dict[str, Any]:
    return hugging_face.batch(hugging_face.Case("llama", kind))


Outcome = dict[str, np.ndarray]


def outcome(model: nn.Module, loss: Any) -> Outcome:
    """Leave out weights without a gradient: an expert that no token of a process went to has 0 on others."""
    gradients = {name: p.grad.cpu().numpy() for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    return {"loss": loss.detach().cpu().numpy(), **gradients}


def on_device(kind: str, device: str) -> dict[str, Any]:
    return {name: x.to(device) for name, x in batch(kind).items()}


@lru_cache(maxsize=64)
def alone(name: str, kind: str, device: str = "cpu") -> Outcome:
    """Return what one process makes of a batch, of packed documents each by itself."""
    model, given = make(name).to(device), on_device(kind, device)
    given = {key: x for key, x in given.items() if not (name in ATTENDS_NOT and key == "position_ids")}
    labels = given.pop("labels")
    with in_float64():
        if kind == "packed":
            parts = []
            for start, tokens in zip(STARTS, DOCUMENTS, strict=True):
                own = {key: x[..., start : start + tokens] for key, x in given.items()}
                parts.append(model(**own, **without_cache(model)).logits)
            logits = torch.cat(parts, 1)
        else:
            logits = model(**given, **without_cache(model)).logits
        loss = hugging_face.objective(logits, labels, hugging_face.Case("llama", kind))
        loss.backward()
    return outcome(model, loss)


def over_a_ring(group: Any, cases: list[Case], device: str = "cpu") -> list[Outcome]:
    torch.set_grad_enabled(True)
    outcomes = []
    for case in cases:
        model = make(case.model).to(device)
        if case.checkpointed:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        with in_float64(), hf.sequence_parallel(model, group, case.layout):
            output = model(**on_device(case.kind, device))
            output.loss.backward()
        sum_gradients(model, group)
        outcomes.append(outcome(model, output.loss))
    return outcomes


def compare(got: Outcome, case: Case, device: str = "cpu") -> None:
    want = alone(case.model, case.kind, device)
    assert got.keys() == want.keys(), case
    errors = {name: relative_error(got[name], want[name]) for name in want}
    bound = lambda name: LOSS if name == "loss" else GRADIENT
    assert {name: error for name, error in errors.items() if not error <= bound(name)} == {}, case


FEW = [Case("qwen3_next", "packed"), Case("nemotron_h", "padded", "contiguous"), Case("jamba", layout="balanced")]
FEW += [Case("kimi_linear", "packed", "contiguous"), Case("lfm2", "holes"), Case("granite4", "packed", "balanced")]
FEW += [Case("falcon_h1", "packed", checkpointed=True)]


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_one_process(four: Any):
    for outcomes in four(2, over_a_ring, FEW):
        for case, got in zip(FEW, outcomes, strict=True):
            compare(got, case)


LAYOUTS = ("zigzag", "contiguous", "balanced")
TABLE = [Case(name, kind, layout) for name in MODELS for kind in ("plain", "packed", "padded", "holes") for layout in LAYOUTS]
TABLE += [Case(name, "packed", checkpointed=True) for name in MODELS]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_and_gradients_of_every_family_are_those_of_one_process(four: Any, ranks: int, name: str):
    cases = [case for case in TABLE if case.model == name]
    for outcomes in four(ranks, over_a_ring, cases):
        for case, got in zip(cases, outcomes, strict=True):
            compare(got, case)


LINEAR = {name: {"layer_types": ["linear_attention"] * 2} for name in ("qwen3_next", "kimi_linear", "granite4")}
LINEAR |= {"lfm2": {"layer_types": ["conv"] * 2}, "mamba2": {}, "mamba": {}}


@pytest.mark.parametrize("name", LINEAR)
def test_one_rank_has_the_bits_of_transformers_own_call(name: str):
    model, given = make(name, **LINEAR[name]).float(), {"input_ids": batch("plain")["input_ids"]}
    padded = {**given, "attention_mask": batch("padded")["attention_mask"]}
    want = [model(**each, use_cache=False).logits for each in (given, padded)]
    for layout in ("striped", *LAYOUTS):
        with hf.sequence_parallel(model, layout=layout):
            got = [model(**each).logits for each in (given, padded)]
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)), layout
    assert torch.equal(model(**given, use_cache=False).logits, want[0])


@pytest.mark.parametrize("name", ["mamba2", "mamba"])
def test_fused_functions_do_not_run_in_a_call_with_documents(name: str, monkeypatch: pytest.MonkeyPatch):
    model, kept = make(name), {"input_ids", "position_ids"}
    modeling = sys.modules[type(model).__module__]
    fused = "mamba2_split_conv1d_scan_combined" if name == "mamba2" else "mamba_inner_fn"
    monkeypatch.setattr(modeling, fused, lambda *_, **__: pytest.fail("it mixes documents"))
    with hf.sequence_parallel(model):
        model(**{key: x for key, x in batch("packed").items() if key in kept})


@pytest.mark.slow
def test_layouts_and_calls_that_states_do_not_support_are_refused_on_every_rank(four: Any):
    for striped, tree, outside in four(2, refused):
        assert "Qwen3NextForCausalLM has linear layers (model.layers.0.linear_attn for one), whose state goes" in striped
        assert "whose state would branch with the tree: pass a row or a document for each path" in tree
        assert "Qwen3NextGatedDeltaNet runs inside sequence_parallel, outside of a call of its model" in outside


def refused(group: Any) -> list[str]:
    model, ids = make("qwen3_next"), batch("plain")["input_ids"]
    messages = [message_of(lambda: hf.sequence_parallel(model, group, "striped").__enter__())]
    with hf.sequence_parallel(model, group), torch.no_grad():
        messages.append(message_of(lambda: model(ids, tree=([[-1], [-1]], [[26], [26]]), shift_labels=ids)))
        messages.append(message_of(lambda: model.model.layers[0].linear_attn(torch.ones(2, 4, 32, dtype=torch.float64))))
    return messages


def test_a_mixer_is_known_by_its_code_and_not_by_its_class():
    class Renamed(transformers.models.lfm2.modeling_lfm2.Lfm2ShortConv):
        pass

    model = make("lfm2")
    config = model.config
    model.model.layers[0].conv = Renamed(config, 0)
    hf.enable(model)

    class Own(Renamed):
        def forward(self, hidden_states: Any, **_: Any) -> Any:
            return self.conv(hidden_states.mT)[..., : hidden_states.shape[1]].mT

    model.model.layers[0].conv = Own(config, 0)
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM mixes tokens by Conv1d \(model.layers.0.conv.conv for one\)"):
        hf.enable(model)
