"""The auxiliary loss of mixture-of-experts models over a ring is that of the whole sequence, with its gradient on every rank."""

from __future__ import annotations

import copy
import re
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import sum_gradients
from ring_attn_torch.transformers.loss import FUNCTION

from .hugging_face import HEADS, SMALL, VOCAB, in_float64
from .test_transformers_refusals import message_of

NEAR = 1e-9
"""A tolerance of float64: a mean over tokens rounds by 1e-16 times their number; the mean of shards is off by 1e-3."""

ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.7, **HEADS}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 5}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_experts": 5, "moe_intermediate_size": 16}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": 5, "sliding_window": 4}),
}


MIXTRAL = import_module("transformers.models.mixtral.modeling_mixtral")


class Case(NamedTuple):
    model: str
    padded: bool = False
    chunk: int | None = None
    checkpointed: bool = False
    layout: str = "zigzag"


CASES = [Case(name, padded) for name in MODELS for padded in (False, True)]
CASES += [Case("mixtral", True, chunk=3), Case("mixtral", checkpointed=True), Case("qwen3_moe", True, layout="contiguous")]


def make(name: str, **more: Any) -> Any:
    """The model with random weights, large enough that experts are far from balanced."""
    config_class, model_class, own = MODELS[name]
    settings = {**SMALL, **ROUTED, **own, **more, "attn_implementation": "eager", "experts_implementation": "eager"}
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise * 0.3 if p.ndim > 1 else 1 + 0.2 * noise)
    return model.double().train()


def batch(padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (2, 27), generator=torch.Generator().manual_seed(5))
    given = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        mask = torch.ones_like(ids)
        mask[0, 18:] = mask[1, :5] = 0
        given |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        given["labels"][1, 5] = -100
    return given


def outcome(model: Any, output: Any) -> dict[str, np.ndarray]:
    """Leave out weights without a gradient: an expert that no token of a process went to has 0 on others."""
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    return {"loss": output.loss.detach().numpy(), "aux_loss": output.aux_loss.detach().numpy()} | gradients


def alone(case: Case) -> dict[str, np.ndarray]:
    model = make(case.model)
    with in_float64():
        output = model(**batch(case.padded), use_cache=False)
        output.loss.backward()
    return outcome(model, output)


def over_a_ring(group: Any, cases: list[Case]) -> list[dict[str, np.ndarray]]:
    torch.set_grad_enabled(True)
    outcomes = []
    for case in cases:
        model = make(case.model)
        if case.checkpointed:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        with in_float64(), hf.sequence_parallel(model, group, case.layout, loss_chunk=case.chunk):
            output = model(**batch(case.padded))
            output.loss.backward()
        sum_gradients(model, group)
        outcomes.append(outcome(model, output))
    return outcomes


def compare(got: dict[str, np.ndarray], case: Case) -> None:
    want = alone(case)
    assert got.keys() == want.keys()
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert {name: error for name, error in errors.items() if not error <= NEAR} == {}, case


def test_loss_auxiliary_loss_and_gradients_on_one_rank_are_those_without_a_ring():
    for case, got in zip(CASES, over_a_ring(None, CASES), strict=True):
        compare(got, case)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_loss_auxiliary_loss_and_gradients_are_those_of_one_process(four: Any, ranks: int):
    for outcomes in four(ranks, over_a_ring, CASES):
        for case, got in zip(CASES, outcomes, strict=True):
            compare(got, case)


@pytest.mark.slow
def test_it_is_not_the_mean_of_the_shards_losses(four: Any):
    case = Case("mixtral")
    for (got,), (shards,) in zip(four(2, over_a_ring, [case]), four(2, over_shards), strict=True):
        assert relative_error(got["aux_loss"], alone(case)["aux_loss"]) <= NEAR
        assert relative_error(shards, alone(case)["aux_loss"]) > 1e-3


def over_shards(group: Any) -> list[np.ndarray]:
    """The mean over ranks of the auxiliary loss that transformers computes from the router logits of each rank's tokens."""
    model = make("mixtral")
    with in_float64(), torch.no_grad(), hf.sequence_parallel(model, group):
        logits = model(**batch(False)).router_logits
        config = model.config
        own = vars(MIXTRAL)[FUNCTION](logits, config.num_local_experts, config.num_experts_per_tok)
    torch.distributed.all_reduce(own, group=group)
    return [(own / group.size()).numpy()]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a cache": ({"use_cache": True, "output_router_logits": True, "labels": None}, "a cache, whose call has no loss"),
    "a tuple": ({"return_dict": False}, "return_dict=False, whose tuple has the auxiliary loss in the place of logits"),
}


@pytest.mark.parametrize(("more", "words"), REFUSED.values(), ids=REFUSED)
def test_calls_that_have_no_auxiliary_loss_are_refused_by_name(more: dict[str, Any], words: str):
    model = make("mixtral")
    with hf.sequence_parallel(model), torch.no_grad():
        message = message_of(lambda: model(**batch(False) | more))
    assert re.search(f"MixtralForCausalLM got output_router_logits=True together with {words}", message), message


def test_a_function_of_another_formula_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    model = make("mixtral")
    monkeypatch.setattr(MIXTRAL, FUNCTION, lambda logits, experts, top_k=2, mask=None: sum(x.mean() for x in logits))
    with hf.sequence_parallel(model):
        assert "computes no auxiliary loss of routers that sequence_parallel knows" in message_of(lambda: model(**batch(False)))
        assert "aux_loss" not in model(**batch(False), output_router_logits=False)


def test_generating_needs_no_auxiliary_loss_and_outside_of_a_ring_it_is_transformers_own():
    model = make("mixtral").eval()
    ids = batch(False)["input_ids"]
    with torch.no_grad():
        before = copy.deepcopy(model)(**batch(False), use_cache=False)
        model.config.output_router_logits = False  # transformers 5.13 cannot generate with it
        text = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
        model.config.output_router_logits = True
        with hf.sequence_parallel(model):
            assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None), text)
        after = model(**batch(False), use_cache=False)
    assert torch.equal(after.aux_loss, before.aux_loss)
    assert torch.equal(after.loss, before.loss)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_trainer_on_a_ring_adds_it_as_transformers_does(four: Any, tmp_path: Path):
    pytest.importorskip("transformers", minversion="5.20", reason="RingTrainer needs it")
    pytest.importorskip("accelerate")
    want = trained_by(None, str(tmp_path / "one"))
    for rank, got in enumerate(four(4, trained_by, str(tmp_path / "ring"))):
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5, err_msg=f"rank {rank}")
        assert relative_error(got[1], want[1]) < 1e-5, rank


def trained_by(group: Any, folder: str) -> tuple[list[float], np.ndarray]:
    """Two steps of two batches each: the loss of each step, and the predicted logits of the rows after them."""
    from .hugging_face_training import Rows, launched

    torch.set_grad_enabled(True)
    with launched(*(0, 1) if group is None else (group.rank(), group.size())):
        arguments: dict[str, Any] = {"use_cpu": True, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
        arguments |= {"max_steps": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "log_level": "error"} | {
            "ddp_find_unused_parameters": False
        }
        kind = transformers.Trainer if group is None else hf.RingTrainer
        settings = transformers.TrainingArguments(folder, **arguments, adam_epsilon=1e-4)
        trainer = kind(model=make("mixtral").float(), args=settings, train_dataset=Rows(), eval_dataset=Rows())
        trainer.train()
        losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        predictions = trainer.predict(Rows(), ignore_keys=None if group else ["aux_loss", "router_logits"]).predictions
        return losses, np.asarray(predictions)
