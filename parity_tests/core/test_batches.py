"""plan_batches: whole documents, as few microbatches as fit, equal compute in each and in each rank."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ring_attn_core import causal, plan_batches, sliding_window
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


def test_nearly_full_microbatches_are_as_even_as_the_longest_document_allows():
    lengths = long_tail(3000)
    plan = plan_batches(lengths, 32, 8192)
    assert sum(lengths) > 0.98 * len(plan) * 32 * 8192
    longest = max(lengths) * (max(lengths) + 1) / 2 * len(plan) / sum(batch.pairs for batch in plan)
    assert longest < plan.balance < 1.02 * longest


def test_few_tokens_a_rank_are_even_over_its_ranks_too():
    plan = plan_batches(long_tail(100), 4, 32768, cost=LLAMA_8B.cost())
    assert max(batch.balance for batch in plan) <= 1.05


def test_a_plan_depends_on_its_arguments_alone():
    lengths = long_tail(1000)
    first, again, other = (plan_batches(lengths, 8, 65536, seed) for seed in (3, 3, 4))
    assert first == again == plan_batches(tuple(lengths), 8, 65536, 3) == plan_batches(np.array(lengths), 8, 65536, seed=3)  # type: ignore[arg-type]
    assert first != other
    assert first[0].documents[:5] == (9, 13, 31, 46, 58)  # on every platform


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
