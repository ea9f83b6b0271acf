"""benchmarks/ is one question a folder; what several need stands in support/, what they found in results/.

What a test, another folder or a pool's process imports stands in a module with a name: a spawned process never loads the
``__main__`` of a folder, so what is defined there cannot be sent to it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NO_QUESTIONS = ("results", "support")


@pytest.mark.parametrize("folder", sorted({path.parent.name for path in BENCHMARKS.glob("*/*.py")} - {*NO_QUESTIONS}))
def test_a_folder_of_benchmarks_asks_a_question_and_says_how_to_put_it(folder: str):
    asked = ast.get_docstring(ast.parse((BENCHMARKS / folder / "__main__.py").read_text())) or ""
    assert asked.partition("\n")[0].endswith("?")
    assert f"python -m benchmarks.{folder}" in asked
    assert [path.name for path in BENCHMARKS.glob("*.py")] == ["__init__.py"], "a question is a folder"
