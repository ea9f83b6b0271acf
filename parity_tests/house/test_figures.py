"""The examples that show again what papers claim: their formulas hold, and they run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples import ring_memory, striped_balance
from ring_attn_core.layouts import LAYOUTS

for package in ("torch", "matplotlib", "rich"):
    pytest.importorskip(package)


ROOT = Path(__file__).resolve().parents[2]


def run(name: str, folder: Path, *arguments: str) -> str:
    """Return the output of an example, whose picture then lies in ``folder``."""
    program = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return done.stdout


def cells(printed: str, row: str) -> list[str]:
    """The cells of a row of a table, by how it begins."""
    return next(re.split(r"\s*│\s*", line.strip("│ \n")) for line in printed.splitlines() if line.startswith(f"│ {row} "))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_steps_of_a_plan_are_those_of_the_dense_mask(layout, ranks):
    """Take an odd length, with padding."""
    plan = striped_balance.made_plan(layout, ranks, 41)
    held = [np.array(plan.positions(rank)) for rank in range(ranks)]
    seen = lambda q, k: int(((q[:, None] >= k) & (q[:, None] < 41)).sum())
    dense = [[seen(held[rank], held[(rank - shift) % ranks]) for shift in range(ranks)] for rank in range(ranks)]
    assert striped_balance.areas(plan) == dense
    assert striped_balance.ring_time(dense) == sum(max(dense[r][s] for r in range(ranks)) for s in range(ranks))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_ring_takes_what_the_docstring_says(ranks):
    c = 26
    time = {
        name: striped_balance.ring_time(striped_balance.areas(striped_balance.made_plan(name, ranks, c * ranks)))
        for name in LAYOUTS
    }
    triangle = c * (c + 1) // 2
    assert time["contiguous"] == triangle + (ranks - 1) * c**2
    assert time["striped"] == ranks * triangle
    assert time["zigzag"] == triangle + (ranks - 1) * c**2 // 2
    assert time["contiguous"] / time["striped"] == striped_balance.speedup("striped", ranks, c * ranks) <= 2 - 1 / ranks


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_example_of_the_balance_predicts_and_measures(tmp_path):
    printed = run("striped_balance", tmp_path, "--length", "257", "--ranks", "2", "--repeats", "1")
    predicted = {name: cells(printed, name)[3] for name in LAYOUTS}
    assert {"contiguous": "1.00 x", "striped": "1.50 x", "zigzag": "1.47 x"}.items() <= predicted.items()
    assert all(float(cells(printed, name)[4]) > 0 for name in LAYOUTS)


def test_the_formulas_of_the_memory_table_are_those_of_the_paper():
    """In float32, where a number has 4 bytes in place of 2."""
    s, c, h, n = 1024, 256, ring_memory.HIDDEN, ring_memory.HEADS
    bfloat16 = {
        "vanilla": 2 * n * s**2,
        "memory-efficient attention": 8 * s * h,
        "... and feed-forward": 2 * s * h,
        "ring": 6 * c * h,
    }
    assert {name: layer.numbers(s, c) * 2 for name, layer in ring_memory.LAYERS.items()} == bfloat16


def test_autograd_keeps_what_the_example_explains():
    """Count a token's input, q, k, v, attention's result, the sum, lse and its rest; 4 h twice in the feed-forward; scores."""
    tokens, h, n = 2 * ring_memory.CHUNK, ring_memory.HIDDEN, ring_memory.HEADS
    thin, inside = tokens * (6 * h + 2 * n) * 4, tokens * 8 * h * 4
    kept = {name: ring_memory.kept_by_torch(layer, tokens) for name, layer in ring_memory.LAYERS.items()}
    scores = n * tokens**2 * 4 + tokens**2  # the probabilities, and the mask as bool
    assert kept["vanilla"] == thin - tokens * 2 * n * 4 + inside + scores
    assert kept["memory-efficient attention"] == thin + inside
    assert kept["... and feed-forward"] == kept["ring"] == thin


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_example_of_the_memory_draws_a_ring_that_holds_least(tmp_path):
    pytest.importorskip("jax")
    printed = run("ring_memory", tmp_path, "--lengths", "1024", "--ranks", "1", "2")
    paper, kept, peak = ({name: float(cells(printed, name)[column]) for name in ring_memory.LAYERS} for column in (2, 3, 4))
    for bytes_of in (paper, kept, peak):
        vanilla, attention, both, ring = (bytes_of[name] for name in ring_memory.LAYERS)
        assert vanilla > attention > both
        assert ring < vanilla / 2
    assert peak["ring"] < peak["... and feed-forward"]
