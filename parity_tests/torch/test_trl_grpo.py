"""The GRPOTrainer of examples/grpo_trl.py, from prefix trees over a ring: losses and gradients of trl's own on one process."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("accelerate")  # first: below, a file of tests is imported, and what it lacks would be an error here
pytest.importorskip("trl")

import torch

import ring_attn_torch.transformers as hf

from .hugging_face import VOCAB, make
from .hugging_face_training import ON_CPUS, Gradients, Result, gradients_of, launched, logged, on_cpus, weights_of
from .test_transformers_training import near

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]
EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_trl.py"
MOST = 9
"""The longest completion; they have any number of tokens from 1, and the last is the end in most."""


def drawn(prompts: list[list[int]], call: int) -> list[list[int]]:
    """Completions that are the same whatever the weights, so that rounding cannot choose another token."""
    rng = np.random.default_rng([call, *map(len, prompts)])
    return [[*rng.integers(3, VOCAB, rng.integers(MOST)).tolist(), 2] for _ in prompts]


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 3 == 0 for token in ids) / MOST for ids in completion_ids]


def rewarded(group: Any) -> Result:
    """Ten updates on five batches of completions; without ``group`` by trl's own GRPOTrainer on one process."""
    from datasets import Dataset as Table  # type: ignore[import-not-found]
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, set_seed
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    if group is None:
        kind: Any = GRPOTrainer
    else:
        spec: Any = importlib.util.spec_from_file_location("grpo_trl", EXAMPLE)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kind = module.TreeGRPOTrainer

    class Fixed(kind):
        calls = 0

        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
            self.calls += 1
            return drawn(prompt_ids, self.calls), None

    torch.set_grad_enabled(True)
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCAB)}, "<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[misc]
    told = {"pad_token": "<0>", "eos_token": "<2>", "padding_side": "left"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **told)
    prompts = [{"prompt": " ".join(f"<{3 + (i + j) % 40}>" for j in range(7 + 3 * i))} for i in range(8)]
    with launched(*(0, 1) if group is None else (group.rank(), group.size())), on_cpus():
        arguments = GRPOConfig(
            output_dir="unused",
            max_steps=10,
            per_device_train_batch_size=8,
            num_generations=4,
            num_iterations=2,
            max_completion_length=MOST,
            learning_rate=1e-3,
            adam_epsilon=1e-4,
            logging_steps=1,
            **ON_CPUS,
        )
        model = make("llama", "float32", "sdpa")
        trainer = Fixed(
            model=model,
            args=arguments,
            reward_funcs=reward,
            train_dataset=Table.from_list(prompts),
            processing_class=tokenizer,
            callbacks=[Gradients()],
        )
        set_seed(0)
        with nullcontext() if group is None else hf.sequence_parallel(model, group):
            trainer.train()
        return Result(weights_of(trainer), logged(trainer), {}, None, None, gradients=gradients_of(trainer))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")  # which trl sets
def test_grpo_from_prefix_trees_trains_on_a_ring_as_trls_own_on_one_process(four: Any):
    one = rewarded(None)
    assert len(one.logs) == len(one.gradients) == 10
    assert min(min(entry["grad_norm"], abs(entry["loss"])) for entry in one.logs) > 1e-3
    for got in four(4, rewarded):
        near(got, one)
