"""Tests of benchmarks/: each folder answers one question; shared code stands in support/, findings in results/.

Code that a test, another folder or a pool's process imports stands in a module with a name: a spawned process never loads the
``__main__`` of a folder, so an object defined there cannot be sent to it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.ring.problem import ALONE, Call
from benchmarks.ring.table import lines

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NO_QUESTIONS = ("results", "support")


@pytest.mark.parametrize("folder", sorted({path.parent.name for path in BENCHMARKS.glob("*/*.py")} - {*NO_QUESTIONS}))
def test_a_folder_of_benchmarks_asks_a_question_and_says_how_to_put_it(folder: str):
    asked = ast.get_docstring(ast.parse((BENCHMARKS / folder / "__main__.py").read_text())) or ""
    assert asked.partition("\n")[0].endswith("?")
    assert f"python -m benchmarks.{folder}" in asked
    assert [path.name for path in BENCHMARKS.glob("*.py")] == ["__init__.py"], "a question is a folder"


def test_a_stored_row_of_the_ring_has_the_form_of_a_public_benchmark():
    """Check that the sequence is that of all GPUs, and that rows without a ring are left out."""
    rates = {"framework": "jax", "ranks": 4, "forward TFLOP/s": 480, "backward TFLOP/s": 450.25}
    rows = [{"call": str(Call(65536, 32, 8, "window")), "candidate": name, **rates} for name in ("direct", ALONE)]
    name = "direct, zigzag, jax, 32/8 heads of 128"
    assert [*lines({"rows": rows})] == [(name, "sliding_window_causal", "262,144", "4", "480.0", "450.2", "-")]
