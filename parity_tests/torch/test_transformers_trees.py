"""Models of transformers on prefix trees: loss and gradients of the rollouts alone, and what does not go with a tree."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import pack_rollouts, sum_gradients, to_layout, token_log_probs, unpack_rollouts

from ..support.rollouts import drawn_rollouts, loss_alone
from .hugging_face import VOCAB, in_float64, make
from .test_transformers_refusals import message_of

pytestmark = pytest.mark.slow


class Tree(NamedTuple):
    """A model on a tree: in chunks of the loss if ``chunk``, in rows of at most ``room`` tokens more than the longest rollout."""

    model: str
    layout: str = "zigzag"
    chunk: int | None = None
    room: int | None = None


TREES = [
    Tree("llama"),
    Tree("llama", "contiguous", chunk=5, room=9),
    Tree("mistral", "striped", room=9),
    Tree("llama", "balanced", room=9),
]
SHORT = 5
"""The longest rollout of a model whose layers have windows of 5 tokens."""


def drawn(of: Tree) -> dict[str, Any]:
    """Rollouts with loss masks and weights of any sign."""
    return drawn_rollouts(np.random.default_rng(3), 9, SHORT if of.model == "mistral" else 12, VOCAB)


def alone(of: Tree) -> dict[str, np.ndarray]:
    """The weighted loss of all rollouts, one by one, and its gradients, by eager attention on one process."""
    model = make(of.model)
    with in_float64():
        total = loss_alone(drawn(of), lambda tokens: model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1))
        total.backward()
    return results(model, total)


def results(model: Any, loss: torch.Tensor) -> dict[str, np.ndarray]:
    return {"loss": loss.detach().numpy()} | {name: p.grad.numpy() for name, p in model.named_parameters()}


def on_rank(group: Any, cases: list[Tree]) -> list[dict[str, np.ndarray]]:
    torch.set_grad_enabled(True)
    return [one(group, case) for case in cases]


def one(group: Any, of: Tree) -> dict[str, np.ndarray]:
    given = drawn(of)
    packed = pack_rollouts(**given, length=None if of.room is None else max(map(len, given["rollouts"])) + of.room)
    model = make(of.model, implementation="ring")
    labels = {"shift_labels": packed.labels, "label_weights": packed.label_weights, "num_items_in_batch": 1}
    with in_float64(), hf.sequence_parallel(model, group, of.layout, loss_chunk=of.chunk):
        loss = model(input_ids=packed.ids, tree=packed.tree, **labels).loss
        loss.backward()
    sum_gradients(model, group)
    return results(model, loss)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_loss_and_gradients_of_a_tree_are_those_of_its_rollouts_alone(four: Any, ranks: int):
    for every in zip(TREES, *four(ranks, on_rank, TREES), strict=True):
        of, first, *others = every
        assert all(np.array_equal(first["loss"], other["loss"]) for other in others)
        exact = alone(of)
        assert first.keys() == exact.keys()
        worst = {name: relative_error(first[name], x) for name, x in exact.items()}
        assert max(worst.values()) < 1e-12, (of, worst)


def test_log_probs_of_a_shard_come_back_per_rollout_and_without_weights_the_loss_is_their_mean(four: Any):
    rollouts = drawn(Tree("llama"))["rollouts"]
    model = make("llama", "float32")
    with torch.no_grad():
        logits = [model(torch.tensor([tokens]), use_cache=False).logits[0, :-1] for tokens in rollouts]
    exact = [-F.cross_entropy(x, torch.tensor(tokens[1:]), reduction="none") for x, tokens in zip(logits, rollouts, strict=True)]
    for each, loss, mean in four(2, log_probs_on_rank, rollouts):
        for got, want in zip(each, exact, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert loss == pytest.approx(mean, rel=1e-6)


def log_probs_on_rank(group: Any, rollouts: list[list[int]]) -> tuple[list[torch.Tensor], float, float]:
    packed, model = pack_rollouts(rollouts), make("llama", "float32", "ring")
    labels = to_layout(packed.labels, "zigzag", 2, pad_value=-100).chunk(2, 1)[group.rank()]
    with torch.no_grad(), hf.sequence_parallel(model, group):
        output = model(input_ids=packed.ids, tree=packed.tree, shift_labels=packed.labels)
    values: Any = token_log_probs(output.logits, labels)
    each = unpack_rollouts(values, packed, group=group, layout="zigzag")
    slots = dict(zip(packed.predictors.tolist(), torch.cat(each).tolist(), strict=True))
    return each, output.loss.item(), -float(np.mean([*slots.values()]))


IDS, LABELS = torch.ones(1, 8, dtype=torch.long), torch.full((1, 8), 3)
GIVEN: dict[str, Any] = {"tree": ([-1, 0, 0], [3, 2, 3])}
CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "labels": ("llama", GIVEN | {"labels": LABELS}, "got labels beside tree .*: pass shift_labels=rollouts.labels"),
    "positions": ("llama", GIVEN | {"position_ids": LABELS}, "got position_ids beside tree .*: the tree sets them"),
    "padding": ("llama", GIVEN | {"attention_mask": IDS}, "got attention_mask beside tree .*: the tree says which tokens see"),
    "a cache": ("llama", GIVEN | {"use_cache": True}, "tree is for training, and use_cache=True for text"),
    "no tree": ("llama", {"tree": ([-1, 1, 0], [3, 2, 3])}, "segment 1 has the parent 1: a parent comes before its children"),
    "no pair": ("llama", {"tree": [-1]}, r"tree must be a pair \(parents, lengths\)"),
    "more tokens": ("llama", {"tree": ([-1], [9])}, "a row of the tree has 9 tokens, and ids have 8"),
    "rows": ("llama", {"tree": ([[-1], [-1]], [[3], [4]])}, "tree has 2 rows and ids have 1"),
    "shifted labels alone": ("llama", {"shift_labels": LABELS}, "shift_labels came without labels"),
    "weights alone": ("llama", GIVEN | {"label_weights": torch.ones(1, 8)}, "label_weights came without shift_labels"),
    "weights of a shard": (
        "llama",
        GIVEN | {"shift_labels": LABELS, "label_weights": torch.ones(1, 4)},
        r"label_weights must be \[1, 8\], .* got \[1, 4\]",
    ),
    "signed weights of a mean": (
        "llama",
        GIVEN | {"shift_labels": LABELS, "label_weights": -torch.ones(1, 8)},
        "label_weights hold a weight that is negative .*: pass num_items_in_batch=1 for the weighted sum",
    ),
    "windows": ("mistral", GIVEN, "layers with a window of 5 tokens, .* the longest path of the tree has 6"),
    "chunks": ("llama4", GIVEN, "layers of chunks of 7 tokens, which count positions of the row"),
    "both sides": ("modernbert", GIVEN, "tree goes with causal layers"),
}


def test_arguments_that_do_not_go_with_a_tree_are_refused_on_every_rank(four: Any):
    for messages in four(2, refused):
        for (name, (_, _, words)), message in zip(CALLS.items(), messages[:-2], strict=True):
            assert re.search(words, message), (name, message)
        assert "pass tree of different content inside sequence_parallel on ranks 0 and 1" in messages[-2]
        assert "pass label_weights of different content inside sequence_parallel on ranks 0 and 1" in messages[-1]


def refused(group: Any) -> list[str]:
    """The words in which each call is refused on this rank."""
    models, last = {name: make(name, "float32", "ring") for name, _, _ in CALLS.values()}, group.rank()
    other = {"tree": ([-1, 0, 0], [3, 2 + last, 3 - last])}
    weights = GIVEN | {"shift_labels": LABELS, "label_weights": torch.ones(1, 8).bfloat16() + last}
    calls = [*((name, given) for name, given, _ in CALLS.values()), ("llama", other), ("llama", weights)]
    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(hf.sequence_parallel(model, group))
        return [message_of(lambda name=name, given=given: models[name](input_ids=IDS, **given)) for name, given in calls]


def test_a_model_without_a_rotary_embedding_takes_no_tree():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    with (
        hf.sequence_parallel(model),
        pytest.raises(ValueError, match=r"GPT2LMHeadModel has no rotary embedding, .* leave tree out"),
    ):
        model(input_ids=IDS, **GIVEN)


def test_a_rotary_embedding_that_depends_on_the_length_takes_the_longest_path_as_in_a_batch_of_all_rollouts():
    rollouts = [[*range(1, 13), *tail] for tail in ([3] * 9, [4] * 7, [5])]  # beyond the 16 tokens from which its base changes
    model, packed = make("dynamic", "float32"), pack_rollouts(rollouts)
    with torch.no_grad():
        batch = torch.tensor([[*tokens, *[0] * (21 - len(tokens))] for tokens in rollouts])  # no token sees the padding after it
        alone = model(batch, use_cache=False).logits
        with hf.sequence_parallel(model):
            logits = model(input_ids=packed.ids, tree=packed.tree).logits
    for mine, exact in zip(unpack_rollouts(logits[:, : packed.ids.shape[1]], packed), alone, strict=True):
        torch.testing.assert_close(mine, exact[: len(mine)], rtol=1e-5, atol=1e-5)
