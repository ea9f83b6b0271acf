"""trl's DPOTrainer and its head of log-probabilities on a ring: weights, losses, metrics and gradients of one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("accelerate")  # first: below, a file of tests is imported, and what it lacks would be an error here
pytest.importorskip("trl")

import torch
import torch.distributed as dist

import ring_attn_torch.transformers as hf

from .hugging_face import VOCAB, make
from .hugging_face_training import ON_CPUS, Gradients, Result, gradients_of, launched, logged, on_cpus, weights_of
from .test_transformers_training import near

pytestmark = pytest.mark.slow
IDS = 3 + torch.arange(2 * 21).view(2, 21) % 40
LABELS = IDS.masked_fill(torch.arange(21) < 9, -100)
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


def preferred_by_trl(group: Any, ring: int, differing: bool = False) -> Result:
    """Ten steps of trl's DPOTrainer with its metrics, on rings of ``ring`` ranks, or on one process without ``group``.

    ``differing``: the reference of the last rank has another weight.
    """
    from datasets import Dataset as Table  # type: ignore[import-not-found]
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer  # type: ignore[import-not-found]

    class RingDPOTrainer(hf.RingTraining, DPOTrainer):
        pass

    torch.set_grad_enabled(True)
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCAB)}, "<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[misc]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<2>")
    text = lambda first, count: "".join(f"<{3 + i % (VOCAB - 3)}> " for i in range(first, first + count))
    pairs = [{"prompt": text(i, 5 + i), "chosen": text(3 * i, 4 + i), "rejected": text(5 * i, 9 - i % 4)} for i in range(8)]
    with launched(*(0, 1) if group is None else (group.rank(), group.size())), on_cpus():
        rings = 1 if group is None else group.size() // ring
        groups = [] if group is None else [dist.new_group(range(i, i + ring)) for i in range(0, group.size(), ring)]
        arguments = DPOConfig(
            output_dir="unused",
            max_steps=10,
            per_device_train_batch_size=2 // rings,
            per_device_eval_batch_size=2 // rings,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            adam_epsilon=1e-4,
            logging_steps=1,
            **ON_CPUS,
        )
        kind: Any = DPOTrainer if group is None else RingDPOTrainer
        more = {} if group is None else {"group": groups[group.rank() // ring]}
        model, reference = make("llama", "float32", "sdpa"), make("llama", "float32", "sdpa")
        if differing and group is not None and group.rank() == group.size() - 1:
            reference.model.norm.weight.data[0] += 1
        table = Table.from_list(pairs)
        told = {"args": arguments, "train_dataset": table, "eval_dataset": table, "processing_class": tokenizer}
        told["callbacks"] = [Gradients()]
        trainer = kind(model=model, ref_model=reference, **told, **more)
        trainer.train()
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        names = ("logps/chosen", "rewards/margins", "entropy", "mean_token_accuracy", "num_tokens")
        metrics = {f"{name} {step}": entry[name] for step, entry in enumerate(entries) for name in names}
        metrics["eval_loss"] = trainer.evaluate()["eval_loss"]
        return Result(weights_of(trainer), logged(trainer), metrics, None, None, gradients=gradients_of(trainer))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*` is deprecated:FutureWarning")  # trl's own
def test_dpo_trains_on_rings_as_on_one_process(four: Any):
    one = preferred_by_trl(None, 1)
    for ring in (4, 2):
        for got in four(4, preferred_by_trl, ring):
            near(got, one)
            assert {name: x for name, x in one.metrics.items() if abs(got.metrics[name] - x) > 1e-4} == {}


def refused_reference(group: Any, ring: int) -> str:
    with pytest.raises(ValueError, match="ref_model") as error:
        preferred_by_trl(group, ring, differing=True)
    return str(error.value)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*` is deprecated:FutureWarning")  # trl's own
@pytest.mark.parametrize("ring", [2, 4])
def test_a_reference_that_differs_between_ranks_is_refused_on_every_rank(four: Any, ring: int):
    for message in four(4, refused_reference, ring):
        assert "rank 3 of all ranks holds another ref_model.model.norm.weight than rank 0" in message


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")  # which trl sets
def test_the_refusal_of_another_loss_of_sft_names_both_names_of_the_plain_loss(tmp_path: Path):
    from trl import SFTConfig  # type: ignore[import-not-found]

    from ring_attn_torch.transformers.arguments import check_training_arguments

    arguments = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, loss_type="dft")
    with pytest.raises(ValueError, match=r'loss_type=dft: .*: leave it "nll", or "chunked_nll", its old name'):
        check_training_arguments(arguments)


def test_a_trainer_before_the_ring_in_the_bases_is_refused():
    from trl import DPOTrainer, SFTTrainer  # type: ignore[import-not-found]

    class Mine(SFTTrainer):
        pass

    for bases in ((SFTTrainer, hf.RingTraining), (Mine, hf.RingTraining), (DPOTrainer, hf.RingTrainer)):
        first, second = (base.__name__ for base in bases)
        with pytest.raises(ValueError, match=rf"put {second} first: class Swapped\({second}, {first}\), because in class Sw"):
            type("Swapped", bases, {})
    other_mixin = type("Other", (), {"train": lambda self: None})
    assert type("Ordered", (other_mixin, hf.RingTraining, Mine), {})


def scored(group: Any, shifted: bool) -> tuple[dict[str, np.ndarray], float, dict[str, np.ndarray]]:
    """The fields of trl's head for whole rows, the loss, and the gradient of a sum over log-probabilities."""
    from trl.trainer.utils import add_fused_lm_head  # type: ignore[import-not-found]

    torch.set_grad_enabled(True)
    model = make("llama", "float32", "sdpa")
    add_fused_lm_head(model, temperature=0.7, outputs=FIELDS[:-1])
    given = {"input_ids": IDS, "attention_mask": (IDS[0, 3] != IDS).long(), "labels": LABELS, "fused_lm_head": True}
    if shifted:
        given["shift_labels"] = torch.nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100)
    ranks = 1
    if group is None:
        output = model(**given)
    else:
        ranks = group.size()
        with hf.sequence_parallel(model, group):
            output = model(**given)
    (output.log_probs * torch.linspace(-1, 1, output.log_probs.shape[1])).sum().div(ranks).backward()
    gradients = {}
    for name, p in model.named_parameters():
        if group is not None:
            dist.all_reduce(p.grad, group=group)
        gradients[name] = p.grad.numpy().copy()
    return {name: getattr(output, name).detach().numpy() for name in FIELDS}, output.loss.item(), gradients


@pytest.mark.parametrize("shifted", [False, True])
def test_trls_head_returns_whole_rows_of_log_probabilities(four: Any, shifted: bool):
    fields, loss, gradients = scored(None, shifted)
    for got_fields, got_loss, got_gradients in four(4, scored, shifted):
        for name, x in fields.items():
            assert got_fields[name].shape == x.shape
            assert np.abs(got_fields[name].astype(float) - x).max() < 1e-5, name
        assert abs(got_loss - loss) < 1e-6
        for name, x in gradients.items():
            assert np.abs(got_gradients[name] - x).max() < 1e-5 * max(1, np.abs(x).max()), name


def refusals(group: Any) -> list[str]:
    from trl.trainer.utils import add_fused_lm_head  # type: ignore[import-not-found]

    told = []
    for head, given in ((False, {"labels": LABELS}), (True, {}), (True, {"labels": LABELS, "ignore_index": -1})):
        model = make("llama", "float32", "sdpa")
        if head:
            add_fused_lm_head(model)
        with hf.sequence_parallel(model, group), pytest.raises(ValueError, match="fused_lm_head") as error:
            model(input_ids=IDS, fused_lm_head=True, **given)
        told.append(str(error.value))
    return told


def test_trls_head_is_refused_where_it_has_nothing_to_score(four: Any):
    for told in four(2, refusals):
        for got, want in zip(told, ("has no head of trl", "without labels", "and ignore_index"), strict=True):
            assert re.search(want, got)


@pytest.mark.parametrize("name", ["GRPOTrainer", "KTOTrainer", "RewardTrainer", "RLOOTrainer"])
def test_other_trainers_of_trl_are_refused(name: str):
    import trl  # type: ignore[import-not-found]

    from ring_attn_torch.transformers.trainer import check_kind

    kind = type("Mine", (hf.RingTraining, getattr(trl, name)), {})
    mine: Any = object.__new__(kind)
    with pytest.raises(ValueError, match=f"cannot compute the loss of trl's {name}: it runs SFTTrainer and DPOTrainer"):
        check_kind(mine)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")  # which trl sets
def test_trls_auxiliary_loss_is_refused_and_without_it_experts_train(tmp_path: Path):
    from datasets import Dataset as Table  # type: ignore[import-not-found]
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    from .test_transformers_routers import make as with_experts

    class RingSFTTrainer(hf.RingTraining, SFTTrainer):
        pass

    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCAB)}, "<0>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<2>")

    def trainer(**more: Any) -> Any:
        settings = {"use_cpu": True, "bf16": False, "report_to": [], "max_steps": 1, "save_strategy": "no", "disable_tqdm": True}
        table = Table.from_dict({"input_ids": [list(range(3, 20))] * 8})
        arguments = SFTConfig(str(tmp_path), **settings, **more)
        return RingSFTTrainer(
            model=with_experts("mixtral").float(), args=arguments, train_dataset=table, processing_class=tokenizer
        )

    with launched(0, 1):
        with pytest.raises(ValueError, match=r"loss of trl, and router_aux_.* Pass router_aux_loss_coef=0.0 in SFTConfig or"):
            trainer()
        assert trainer(router_aux_loss_coef=0.0).train().global_step == 1
