"""RingTrainer trains as transformers' Trainer on one process does: weights, losses, norms, metrics, checkpoints."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", minversion="5.20", reason="RingTrainer needs it")
pytest.importorskip("accelerate")

import torch
from safetensors.numpy import load_file

import ring_attn_torch.transformers as hf
from ring_attn_torch.transformers.attention import ACCELERATE_HOOK

from ..support.models import apart
from .hugging_face import make
from .hugging_face_training import ROWS, TOKENS, Result, Rows, Run, all_trained, trained, tuned_by_trl
from .models import shard_fully

pytestmark = pytest.mark.slow
NEAR = 1e-5
"""The largest difference of a run from one process: a chosen bound, since a rounding grows with every step of Adam."""


def near(got: Result, want: Result) -> None:
    """Weights relative to the largest of their tensor, losses, norms and the gradients of each step to themselves."""
    assert got.weights.keys() == want.weights.keys()
    assert len(got.logs) == len(want.logs) > 0
    worst = {name: float(np.abs(got.weights[name] - x).max() / max(np.abs(x).max(), 1)) for name, x in want.weights.items()}
    assert {name: x for name, x in worst.items() if x > NEAR} == {}
    for ours, theirs in zip(got.logs, want.logs, strict=True):
        assert abs(ours["loss"] - theirs["loss"]) < NEAR * min(1, abs(theirs["loss"]))
        assert abs(ours["grad_norm"] - theirs["grad_norm"]) < NEAR * theirs["grad_norm"]
    assert len(got.gradients) > 0
    later = want.gradients[-len(got.gradients) :]  # those of a run that went on from a checkpoint
    assert max(map(apart, got.gradients, later)) < NEAR


def test_a_model_that_was_evaluated_before_train_trains_as_one_process(four: Any):
    """accelerate marks an evaluated model as prepared, and would wrap it in DDP no more."""
    evaluated = Run(2, "unused", before="evaluate")
    one = trained(evaluated)
    for (got,) in four(4, all_trained, [evaluated._replace(ring=2, rows=1)]):
        near(got, one)


@pytest.mark.exhaustive
def test_predictions_and_another_trainers_evaluation_before_train_change_no_step(four: Any):
    one = trained(Run(2, "unused"))
    runs = [Run(2, "unused", before=before) for before in ("predict", "another", "evaluate")]
    for results in four(4, all_trained, [*runs, runs[1]._replace(ring=2, rows=1)]):
        for got in results:
            near(got, one)


def test_the_best_checkpoint_is_loaded_at_the_end_on_every_rank(four: Any, tmp_path: Path):
    """The best of three is the first: the greatest loss wins."""
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    settings = tuple({**every, "load_best_model_at_end": True, "greater_is_better": True}.items())
    run = Run(3, str(tmp_path / "one"), dtype="float64", settings=settings)
    best = trained(run).weights
    last = trained(run._replace(settings=())).weights
    assert apart(best, last) > 1e-3
    for (got,) in four(4, all_trained, [run._replace(folder=str(tmp_path / "rings"), ring=2, rows=1)]):
        assert apart(got.weights, best) < 1e-11
        saved = load_file(tmp_path / "rings" / "checkpoint-1" / "model.safetensors")
        assert {name: x for name, x in got.weights.items() if not np.array_equal(saved[name], x)} == {}


def unsummed(group: Any) -> str:
    """Train a model that DDP does not wrap."""

    class Alone(hf.RingTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.prepare_model = lambda model, **_: model

    with pytest.raises(ValueError, match="gradients that are not summed") as error:
        trained(Run(3, "unused"), group, Alone)
    return str(error.value)


def test_weights_that_differ_after_the_first_step_are_refused_on_every_rank(four: Any):
    for message in four(4, unsummed):
        assert re.match("rank 1 of all ranks holds another model.* than rank 0: the first step was made with gradients", message)


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", [10, pytest.param(50, marks=pytest.mark.full)])
def test_four_ranks_train_evaluate_predict_and_resume_as_one_process(four: Any, tmp_path: Path, steps: int):
    """Uneven labels, packed rows, two batches in a step; a run that is killed goes on from its checkpoint as one that is not."""
    one = trained(Run(steps, str(tmp_path / "one"), evaluated=True))
    saving = (("save_strategy", "steps"), ("save_steps", 4))
    folder = str(tmp_path / "killed")
    runs = [
        Run(steps, str(tmp_path / "four"), evaluated=True),
        Run(steps, folder, settings=saving, killed_after=6),
        Run(steps, folder, settings=saving, resumed=True),
    ]
    for got, _, resumed in four(4, all_trained, runs):
        near(got, one)
        assert got.metrics["eval_accuracy"] == one.metrics["eval_accuracy"]
        assert abs(got.metrics["eval_loss"] - one.metrics["eval_loss"]) < NEAR
        assert got.logits is not None
        assert one.logits is not None
        assert got.logits.shape == (ROWS, TOKENS, one.logits.shape[-1])
        assert np.abs(got.logits - one.logits).max() < 10 * NEAR * np.abs(one.logits).max()
        assert np.array_equal(got.labels, np.stack([Rows()[row]["labels"] for row in range(ROWS)]))
        assert len(resumed.logs) == steps
        near(resumed, got)


@pytest.mark.exhaustive
def test_two_rings_have_rows_of_their_own_and_count_the_labels_of_both(four: Any, tmp_path: Path):
    """Train two rings of two ranks, with the loss in chunks and layers offloaded to the host, and by accelerate's mesh with cp.

    The layers have windows, which accelerate's own context parallelism refuses.
    """
    settings: dict[str, Any] = {"model": "mistral", "evaluated": True}
    one = trained(Run(10, str(tmp_path / "one"), settings=(("per_device_eval_batch_size", 6),), **settings))
    offloading = (
        ("activation_checkpointing", True),
        ("activation_checkpointing_kwargs", {"offload": True, "use_reentrant": False}),
        ("per_device_eval_batch_size", 3),
    )
    chunks = ("loss_chunk", 5), ("layout", "balanced")
    runs = [
        Run(10, str(tmp_path / "rings"), settings=offloading, trainer=chunks, ring=2, rows=1, **settings),
        Run(10, str(tmp_path / "mesh"), settings=(("cp", 2),), rows=1, **settings),  # 4 rows a ring, 6 in the last batch of 8
    ]
    for results in four(4, all_trained, runs):
        for got in results:
            near(got, one)
            assert got.metrics["eval_accuracy"] == one.metrics["eval_accuracy"]
            assert got.logits is not None
            assert one.logits is not None
            assert np.abs(got.logits - one.logits).max() < 10 * NEAR * np.abs(one.logits).max()
        assert abs(results[0].metrics["eval_loss"] - one.metrics["eval_loss"]) < NEAR


@pytest.mark.exhaustive
def test_a_model_that_divides_by_the_labels_of_a_batch_trains_and_rows_are_counted_once(four: Any, tmp_path: Path):
    """The Trainer multiplies its loss by no ranks, as Gemma 3's with images; tokens and operations are those of one process."""
    run = Run(3, str(tmp_path / "one"), evaluated=True, own_mean=True, settings=(("include_num_input_tokens_seen", "all"),))
    one = trained(run)
    assert one.counted[0] == 3 * 2 * 2 * TOKENS
    for (got,) in four(4, all_trained, [run._replace(folder=str(tmp_path / "four"))]):
        near(got, one)
        assert abs(got.metrics["eval_loss"] - one.metrics["eval_loss"]) < NEAR
        assert got.counted == one.counted


@pytest.mark.exhaustive
def test_rows_that_come_as_a_stream_go_to_every_rank_of_a_ring(four: Any, tmp_path: Path):
    """Check this against accelerate, which would let the first rank read all rows, and hand each rank its own."""
    one = trained(Run(3, str(tmp_path / "one"), streamed=True))
    four_alike = Run(3, str(tmp_path / "four"), streamed=True)
    for results in four(4, all_trained, [four_alike, four_alike._replace(ring=2, rows=1)]):
        for got in results:
            near(got, one)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # trl's own, which sets it by default
@pytest.mark.parametrize(("steps", "evaluated"), [(10, False), (2, True)], ids=["", "evaluated before"])
def test_trls_sft_trainer_trains_on_packed_documents_as_on_one_process(four: Any, tmp_path: Path, steps: int, evaluated: bool):
    pytest.importorskip("trl")
    one = tuned_by_trl(None, str(tmp_path / "one"), steps)
    for got in four(4, tuned_by_trl, str(tmp_path / "four"), steps, evaluated):
        near(got, one)
        assert abs(got.metrics["eval_loss"] - one.metrics["eval_loss"]) < NEAR


@pytest.mark.exhaustive
def test_a_model_trained_under_fsdp2_is_saved_and_comes_back(four: Any, tmp_path: Path):
    want = four(4, sharded_and_saved, str(tmp_path))
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(tmp_path)
    assert model.config._attn_implementation == "sdpa"
    assert "ring" not in (tmp_path / "config.json").read_text()
    saved = {name: p.detach().numpy() for name, p in model.named_parameters()}
    for weights in want:
        assert weights.keys() == saved.keys()
        assert all(np.array_equal(saved[name], x) for name, x in weights.items())
        assert not all(np.array_equal(p.detach().numpy(), saved[n]) for n, p in make("llama", "float32").named_parameters())


def sharded_and_saved(group: Any, folder: str) -> dict[str, np.ndarray]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    torch.set_grad_enabled(True)
    model = make("llama", "float32")
    shard_fully(group, *model.model.layers, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with hf.sequence_parallel(model, group):
        for row in range(2):
            (model(**{name: x[None] for name, x in Rows()[row].items()}).loss * group.size()).backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if group.rank() == 0:
            model.save_pretrained(folder, state_dict=whole)
    return {name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()}


ALONE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "label_smoothing_factor=0.1": ({"label_smoothing_factor": 0.1}, {}),
    "neftune_noise_alpha=5": ({"neftune_noise_alpha": 5}, {}),
    "torch_compile=True": ({"torch_compile": True}, {}),
    "train_sampling_strategy=batch_rebalance": ({"train_sampling_strategy": "batch_rebalance"}, {}),
    "dispatch_batches=True": ({"accelerator_config": {"dispatch_batches": True}}, {}),
    "eval_use_gather_object=True": ({"eval_use_gather_object": True}, {}),
    "takes no compute_loss_func": ({}, {"compute_loss_func": print}),
    "loss_chunk is a number of tokens": ({}, {"loss_chunk": 0}),
    "unknown layout 'spiral'": ({}, {"layout": "spiral"}),
}
OF_RANKS: dict[str, dict[str, Any]] = {
    "average_tokens_across_devices=False: every rank has a part": {"settings": (("average_tokens_across_devices", False),)},
    "4 ranks and parallelism_config says cp_size=2": {"settings": (("cp", 2),), "trainer": (("group", "all"),)},
    "a Trainer's rings are of consecutive ranks": {"trainer": (("group", "crossed"),)},
}


@pytest.mark.parametrize("words", ALONE)
def test_unsupported_settings_of_a_trainer_on_a_ring_are_refused_by_name(tmp_path: Path, words: str):
    settings, trainer = ALONE[words]
    with pytest.raises(ValueError, match=re.escape(words)):
        trained(Run(1, str(tmp_path), settings=tuple(settings.items()), trainer=tuple(trainer.items())), kind=hf.RingTrainer)


@pytest.mark.exhaustive
def test_rings_that_a_trainer_cannot_deal_rows_to_are_refused_on_every_rank(four: Any, tmp_path: Path):
    for messages in four(4, refused, str(tmp_path)):
        for words, message in zip(OF_RANKS, messages, strict=True):
            assert words in message


def refused(group: Any, folder: str) -> list[str]:
    crossed = [torch.distributed.new_group([i, i + 2]) for i in range(2)]
    groups = {"all": group, "crossed": crossed[group.rank() % 2]}
    messages = []
    for given in OF_RANKS.values():
        trainer = tuple((name, groups[x]) for name, x in given.get("trainer", ()))
        with pytest.raises(ValueError, match=r".") as error:
            trained(Run(1, folder, settings=given.get("settings", ()), trainer=trainer), group)
        messages.append(str(error.value))
    return messages


def test_the_methods_that_ring_trainer_replaces_are_there():
    """A release of transformers or accelerate that names it otherwise fails here, not in somebody's training."""
    from accelerate import Accelerator
    from accelerate.big_modeling import _attach_context_parallel_hooks  # type: ignore[import-not-found]
    from transformers import Trainer

    known = {
        "create_accelerator_and_postprocess": ["self"],
        "train": None,
        "evaluation_loop": None,
        "compute_loss_context_manager": ["self"],
        "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
        "prediction_step": ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"],
        "get_train_dataloader": ["self"],
        "get_cp_size": ["self"],
        "get_tp_size": ["self"],
        "floating_point_ops": ["self", "inputs"],
        "_track_num_input_tokens": ["self", "inputs"],
        "_prepare_context_parallel_inputs": ["self", "model", "inputs"],
        "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
        "_load_best_model": ["self"],
        "_issue_warnings_after_load": ["self", "load_result"],
    }
    public = {name for name, x in vars(hf.RingTraining).items() if callable(x) and not name.startswith("__")}
    assert public - {"_gather_rows", "_models", "_on_the_ring", "_next", "_compare_ranks"} == set(known)
    for name, arguments in known.items():
        found = list(inspect.signature(getattr(Trainer, name)).parameters)
        assert arguments is None or found == arguments, name
    loss = inspect.getsource(Trainer.compute_loss)
    assert "loss_scale = self.accelerator.num_processes // self.get_tp_size()" in loss
    assert "with self.compute_loss_context_manager():" in inspect.getsource(Trainer.training_step)
    assert "self.gather_function(" in inspect.getsource(Trainer.evaluation_loop)
    assert list(inspect.signature(Accelerator._prepare_cp).parameters) == ["self", "args"]
    assert list(inspect.signature(Accelerator._prepare_device_mesh).parameters) == ["self"]
    assert f"def {ACCELERATE_HOOK.rpartition('.')[2]}(" in inspect.getsource(_attach_context_parallel_hooks)
