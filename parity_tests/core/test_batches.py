"""plan_batches: whole documents, as few microbatches as fit, equal compute in each and in each rank."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from ring_attn_core import causal, plan_batches, sliding_window
from ring_attn_core.data.rollouts import pack_rollouts
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.plan.batches import BatchPlan, ComputeCost, best_fit
from ring_attn_core.plan.documents import PackedDocuments

from ..support.document_lengths import long_tail

LLAMA_8B = TransformerConfig(vocab=128_256, dim=4096, depth=32, heads=32, kv_heads=8, hidden=14_336)


def check_plan(plan: BatchPlan, lengths: list[int], ranks: int, seq_local: int) -> None:
    assert sorted(document for batch in plan for document in batch.documents) == list(range(len(lengths)))
    for batch in plan:
        assert list(batch.documents) == sorted(batch.documents)
        assert batch.lengths == tuple(lengths[document] for document in batch.documents)
        assert sum(batch.lengths) <= ranks * seq_local
        assert batch.pairs == sum(n * (n + 1) / 2 for n in batch.lengths)


def drawn(seed: int) -> tuple[list[int], int, int]:
    """Return lengths, ranks and tokens a rank: a few to hundreds of documents, some as long as a microbatch."""
    rng = np.random.default_rng(seed)
    ranks, seq_local = int(rng.integers(1, 9)), int(rng.integers(1, 200))
    longest = max(1, int(ranks * seq_local * rng.uniform(0.01, 1)))
    return rng.integers(1, longest + 1, int(rng.integers(1, 300))).tolist(), ranks, seq_local


def test_every_document_is_in_one_microbatch_and_tokens_fit():
    for seed in range(200):
        lengths, ranks, seq_local = drawn(seed)
        plan = plan_batches(lengths, ranks, seq_local, seed)
        check_plan(plan, lengths, ranks, seq_local)
        order = sorted(range(len(lengths)), key=lambda i, lengths=lengths: -lengths[i])
        assert len(plan) <= max(best_fit(lengths, order, ranks * seq_local)) + 1
        layout = plan[seed % len(plan)].layout
        assert (layout.ranks, layout.seq_local, layout.length) == (ranks, seq_local, ranks * seq_local)
        assert layout.documents == (plan[seed % len(plan)].lengths,)


@pytest.mark.parametrize("cost", [None, 30_000, LLAMA_8B.cost()], ids=["pairs", "number", "Llama-3-8B"])
def test_compute_of_a_long_tail_is_even_over_microbatches(cost):
    lengths = long_tail(10_000)
    plan = plan_batches(lengths, 64, 8192, cost=cost)
    check_plan(plan, lengths, 64, 8192)
    assert len(plan) == -(-sum(lengths) // (64 * 8192))
    assert plan.balance <= 1.05
    assert max(batch.balance for batch in plan[:3]) <= 1.05


@pytest.mark.parametrize(("documents", "ranks", "seq_local"), [(3000, 32, 8192), (5000, 16, 16384)])
def test_nearly_full_microbatches_are_as_even_as_the_longest_document_allows(documents, ranks, seq_local):
    lengths = long_tail(documents)
    plan = plan_batches(lengths, ranks, seq_local)
    assert sum(lengths) > 0.98 * len(plan) * ranks * seq_local
    longest = max(lengths) * (max(lengths) + 1) / 2 * len(plan) / sum(batch.pairs for batch in plan)
    assert plan.balance == pytest.approx(longest)


@pytest.mark.parametrize("seq_local", [8139, 8147, 8178])
def test_microbatches_without_padding_are_even(seq_local):
    lengths = long_tail(10_000)
    plan = plan_batches(lengths, 64, seq_local)
    assert len(plan) == 84 and sum(lengths) > 0.994 * 84 * 64 * seq_local
    assert plan.balance <= 1.02


def test_the_cost_of_tokens_decides_who_shares_a_microbatch():
    plan = plan_batches([6000] + [1500] * 8, 1, 12288, cost=28_628.0)
    assert len(plan) == 2 and plan.balance < 1.03


def test_documents_of_unlike_masks_are_even():
    lengths, pairs = [3300] * 100 + [500] * 600, [406_650] * 100 + [125_250] * 600  # trees of 64 rollouts beside single documents
    assert plan_batches(lengths, 8, 4096, pairs=pairs).balance < 1.01
    assert plan_batches([1000] * 32 + [60] * 400, 1, 16_000, pairs=[3000] * 32 + [1830] * 400).balance < 1.01


def test_few_tokens_a_rank_are_even_over_its_ranks_too():
    plan = plan_batches(long_tail(100), 4, 32768, cost=LLAMA_8B.cost())
    assert max(batch.balance for batch in plan) <= 1.05


def test_a_plan_depends_on_its_arguments_alone():
    lengths = long_tail(1000)
    first, again, other = (plan_batches(lengths, 8, 65536, seed) for seed in (3, 3, 4))
    assert first == again == plan_batches(tuple(lengths), 8, 65536, 3) == plan_batches(np.array(lengths), 8, 65536, seed=3)  # type: ignore[arg-type]
    assert first != other
    assert plan_batches(lengths, np.int32(8), np.int32(65536), np.int8(3)) == first  # type: ignore[arg-type]
    assert first[0].documents[:5] == (9, 11, 19, 25, 34)  # on every platform


def test_a_windowed_layer_counts_fewer_pairs():
    config = TransformerConfig(vocab=256, dim=64, depth=4, heads=4, hidden=96, windows=(None, 9, 9, 9))
    cost = config.cost()
    assert cost.token == (64 * (4 * 64 + 3 * 96) + 256 * 64 / 4) / (2 * 64)
    assert cost.masks == ((causal(), 0.25), (sliding_window(9), 0.75))
    (batch,) = plan_batches([40, 7], 1, 64, cost=cost)
    expected = {mask: sum(mask.area(n, n) for n in (40, 7)) for mask, _ in cost.masks}
    assert batch.pairs == 0.25 * expected[causal()] + 0.75 * expected[sliding_window(9)]
    assert batch.compute == batch.pairs + cost.token * 47
    windowed = plan_batches([200, 7, 90], 4, 80, cost=cost)[0].layout
    packed = PackedDocuments.of(windowed.documents[0], dict(cost.masks))
    work = [sum(map(packed.cost, windowed.held(rank))) for rank in range(4)]
    assert max(work) <= 1.1 * sum(work) / 4


def test_the_cost_of_a_hybrid_counts_its_state_and_only_its_attention_layers_have_masks():
    sizes: dict[str, Any] = {"vocab": 256, "dim": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 96}
    mlp, head = 3 * 64 * 96, 256 * 64
    delta = 64 * (2 * 2 * 16 + 4 * 16) + 64 * 4 * 16 + 64 * 2 * 4 + 4 * 16 * 64 + 3 * 4 * 16 * 16
    mamba = 64 * (4 * 32 + 2 * 128) + 64 * 4 * 32 + 64 * 4 + 4 * 32 * 64 + 2 * 4 * 32 * 128
    attention = 64 * (2 * 64 + 2 * 32)
    for mixers, windows, products, masks in (
        (["attention", "mamba2"], [9, None], attention + mamba, ((sliding_window(9), 0.5),)),
        (["gated_delta_net", "mamba2"], None, delta + mamba, ()),
    ):
        cost = TransformerConfig(depth=2, mixers=mixers, windows=windows, **sizes).cost()
        assert cost.masks == masks
        assert cost.token == (mlp + (head + products) / 2) / (2 * 64)
        (batch,) = plan_batches([40, 7], 2, 32, cost=cost)
        share = sum(share * mask.area(n, n) for mask, share in masks for n in (40, 7))
        assert batch.pairs == share and batch.compute == share + 47 * cost.token
        assert batch.layout.length == 64 and 1 <= batch.balance < 1.1


def test_prefix_trees_are_planned_by_their_own_pairs():
    rng = np.random.default_rng(0)
    shapes = ([(9, 100)] * 9 + [(1, 780)]) * 24  # rollouts of a prompt, and tokens: one alone has nearly as many, and more pairs
    groups = [[[*range(9), *rng.integers(9, 999, each - int(rng.integers(9))).tolist()] for _ in range(n)] for n, each in shapes]
    packed = [pack_rollouts(group) for group in groups]
    lengths, pairs = [x.ids.shape[1] for x in packed], [x.pairs[0] for x in packed]
    plan = plan_batches(lengths, 4, 7500, pairs=pairs)
    sums = [sum(pairs[document] for document in batch.documents) for batch in plan]
    assert [batch.pairs for batch in plan] == sums
    assert plan.balance == max(sums) * len(sums) / sum(sums) < 1.02
    with pytest.raises(ValueError, match=r"plan_batches got pairs=.*pass layout='balanced' to shard_batch"):
        _ = plan[0].layout


def test_documents_that_do_not_fit_whole_take_more_microbatches():
    plan = plan_batches([6] * 5, 2, 5)
    assert [batch.lengths for batch in plan] == [(6,)] * 5
    assert len(plan_batches([5] * 10 + [3, 2] * 4, 2, 5)) == 7  # 70 tokens: as few as these allow


def test_a_plan_says_what_it_balanced_and_what_is_left():
    text = str(plan_batches([6, 2, 2, 2, 3], 2, 4))
    assert text.startswith("5 documents of 15 tokens in 2 microbatches of 8 (2 ranks x 4): 6.2% of the slots are padding; ")
    assert re.search(r"most / mean 1\.\d{3}; the most has a document of 6 tokens: ranks wait only within", text)
    assert str(plan_batches([4, 4], 1, 4)).endswith("compute of a microbatch, most / mean 1.000")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([4, 9], 2, 4), r"document 1 has 9 tokens, and a microbatch of 2 ranks x 4 tokens holds 8: pass tokens_per_rank=5"),
        (([], 2, 4), "lengths are the tokens of the documents of a global batch, at least one"),
        (([[4], [5]], 2, 4), "lengths are the tokens of the documents of a global batch"),
        (([4, 0], 2, 4), "ints of at least 1"),
        (([4.0], 2, 4), "ints of at least 1"),
        (([4], 0, 4), "a ring needs at least 1 rank, got 0"),
        (([4], 2, 0), "tokens_per_rank must be an int of at least 1, got 0"),
        (([4], 2, 4, 0.5), "seed"),
        (([4], 2, 4, 0, -1.0), "cost must be the compute of a token in visible pairs"),
        (([4], 2, 4, 0, "llama"), "cost must be the compute of a token in visible pairs"),
        (([4], 2, 2**30), "a microbatch of 2 ranks x 1073741824 tokens is too long: int32 holds 2147483647 positions"),
        ((np.array(4), 2, 4), "lengths are the tokens of the documents of a global batch"),
        (([4], 2, 4, 0, 1e308), "a number from 0 to 1e.30, or config.cost"),
        (([4], 2, 4, 0, ComputeCost(-1.0)), "cost must be the compute of a token in visible pairs"),
        (([4, 2], 2, 4, 0, None, [[1], [1, 2]]), "pairs must be a list with a number for each of 2 documents, got list"),
        (([4, 2], 2, 4, 0, None, [10]), r"pairs must be a list with a number for each of 2 documents, got int64 \[1\]"),
        (([4, 2], 2, 4, 0, None, [10, float("nan")]), r"pairs\[1\] must be the visible pairs of document 1 of 2 tokens"),
        (([4, 2], 2, 4, 0, None, [17, 3]), r"pairs\[0\] must be the visible pairs of document 0 of 4 tokens, .* got 17"),
    ],
)
def test_mistakes_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        plan_batches(*arguments)


def test_equally_long_documents_are_dealt_evenly():
    plan = plan_batches([10] * 120, 2, 70)
    assert sorted(len(batch.documents) for batch in plan) == [13] * 6 + [14] * 3


def test_the_command_prints_a_row_for_each_microbatch(tmp_path):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from ring_attn_cli.main import app

    run = lambda *arguments: CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "120"})
    (tmp_path / "lengths.json").write_text("[60, 31, 5, 17, 29, 1, 44, 8]")
    done = run("--batches", str(tmp_path / "lengths.json"), "--ranks", "2", "--tokens", "40")
    rows = [cells for line in done.output.split("\n") if len(cells := line.split()) == 6 and cells[0].isdecimal()]
    plan = plan_batches([60, 31, 5, 17, 29, 1, 44, 8], 2, 40)
    assert done.output.startswith("8 documents of 195 tokens in 3 microbatches of 80")
    assert [row[:4] for row in rows] == [
        [str(i), str(len(batch.documents)), str(sum(batch.lengths)), str(max(batch.lengths))] for i, batch in enumerate(plan)
    ]
    assert [row[5] for row in rows] == [f"{batch.balance:.3f}" for batch in plan]
    for arguments, said in (
        (["--batches", "9,9", "--ranks", "2", "--tokens", "4"], "pass tokens_per_rank=5 or more"),
        (["--batches", "x"], "--batches takes lengths in tokens such as [4096, 512], or a file of them, got 'x'"),
        (["--batches", "9", "--length", "8"], "--batches gives the length and has one layout: leave out --length"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 2 and said in refused.output.replace("\n", " ")


def test_cost_none_counts_pairs_alone():
    assert plan_batches([5, 9], 2, 8) == plan_batches([5, 9], 2, 8, cost=0) == plan_batches([5, 9], 2, 8, cost=ComputeCost())
