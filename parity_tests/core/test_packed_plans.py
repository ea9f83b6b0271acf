"""The drawings of packed documents and of prefix trees by ``ring-attn plan``, and their refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ring_attn_cli.main import app
from ring_attn_cli.plan.packed import plan_tree
from ring_attn_core.data.trees import Tree
from ring_attn_core.layouts import LAYOUTS

from ..support.rollouts import ancestors, drawn_tree

ROOT = Path(__file__).resolve().parents[2]


def plan(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_documents_are_drawn_with_their_work_and_traffic_beside_the_other_layouts(tmp_path: Path):
    done = plan("--documents", "4,12,3,8,5", "--ranks", "4")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert "3 of 5 documents on one rank: their keys do not travel" in done.output
    assert ["documents", "AAAABBBBBBBBBBBBCCCDDDDDDDDEEEEE"] in lines
    assert ["ranks", "00012222222211000003333333311111"] in lines
    assert ["0", "2", "1", "2", "35", "0.966", "10", "3"] in lines and ["2", "1", "0", "1", "36", "0.993", "0", "16"] in lines
    assert 'the busiest rank receives or sends 67% of the keys that a ring brings it; "auto" takes it up to 50%' in " ".join(
        done.output.split()
    )
    assert ["balanced", "1.048", "38", "21", "21.9", "%"] in lines
    assert ["zigzag", "1.352", "49", "19", "19.8", "%"] in lines
    assert {"contiguous", "striped"} <= {line[0] for line in lines if line}
    (tmp_path / "lengths").write_text("4 12 3\n8, 5\n")
    assert plan("--documents", str(tmp_path / "lengths"), "--ranks", "4").output == done.output
    assert plan("--documents", ",".join(["4"] * 200), "--ranks", "4").exit_code == 0, "a list that is too long for a file's name"
    drawn = plan("--documents", "4,12,3,8,5", "--ranks", "4", "--layout", "contiguous").output.split("\n")
    assert "ranks     " + "".join(str(rank) * 8 for rank in range(4)) in drawn


def test_a_tree_is_drawn_with_its_work_and_traffic_beside_the_other_layouts(tmp_path: Path):
    done = plan("--ranks", "2", "--tree", "8,4x3", "--layout", "zigzag")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert "4 segments, 3 rollouts of up to 12 tokens" in done.output
    assert "20 tokens, 36 in rollouts alone: 1.8 times fewer" in done.output
    assert "162 pairs, 234 in rollouts alone: 1.4 times fewer" in done.output
    assert ["segments", "AAAAAAAABBBBCCCCDDDD"] in lines and ["ranks", "00000111111111100000"] in lines
    (tmp_path / "tree").write_text("-1:8 0:4\n0:4, 0:4\n")
    assert plan("--ranks", "2", "--tree", str(tmp_path / "tree"), "--layout", "zigzag").output == done.output
    balanced = plan("--ranks", "2", "--tree", "8,4x3").output
    assert "balanced layout, prefix tree, 2 ranks" in balanced
    assert ["ranks", "00011111111110000000"] in [line.split() for line in balanced.splitlines()]
    for drawn in (done.output, balanced):
        rows = [line.split()[:3] for line in drawn.splitlines() if line.endswith("% ")]
        assert sorted(rows) == [
            ["balanced", "1.000", "81"],
            ["contiguous", "1.321", "107"],
            ["striped", "1.062", "86"],
            ["zigzag", "1.148", "93"],
        ]


def test_only_the_last_segment_of_each_path_ends_a_rollout():
    chain = plan("--ranks", "2", "--tree", "-1:4 0:2 1:3 2:5", "--layout", "zigzag").output
    assert "4 segments, 1 rollouts of up to 14 tokens" in chain
    assert "14 tokens, 14 in rollouts alone: 1.0 times fewer" in chain
    forest = plan("--ranks", "2", "--tree", "-1:4 0:2 -1:3 2:5 2:6", "--layout", "zigzag").output
    assert "5 segments, 3 rollouts of up to 9 tokens" in forest


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", [*LAYOUTS, "balanced"])
def test_the_work_of_a_tree_is_counted_by_its_paths(layout: str, ranks: int):
    drawn = drawn_tree(np.random.default_rng(ranks), 12)
    paths = ancestors(*drawn)
    for held, work in zip((each := plan_tree(layout, Tree(*map(tuple, drawn)), ranks)).runs, each.work, strict=True):
        mine = {position for run in held for position in run.positions()}
        assert work.pairs == sum(len(paths[position]) for position in mine)
        assert work.remote == len({key for position in mine for key in paths[position]} - mine)
