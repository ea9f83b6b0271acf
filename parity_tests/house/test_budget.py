"""The house stays readable: each room has a budget of lines, and docstrings a share of them, in ``budget.toml``.

    python -m parity_tests.house.test_budget    print every room's lines, the budget, and the share of docstrings

A room may shrink freely; lower its budget then. It grows by a commit that raises its budget and says why.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from .source import ROOT, files

BUDGET = tomllib.loads(Path(__file__).with_name("budget.toml").read_text(encoding="utf-8"))
PACKAGES = "ring_attn_core", "ring_attn_jax", "ring_attn_torch", "ring_attn_cli"


def count_lines(room: str) -> int:
    """Return the lines of all Python files of a room; of a package's own folder those that lie in it directly."""
    paths = (ROOT / room).glob("*.py") if room in PACKAGES else files(room)
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def list_rooms() -> list[str]:
    """Return the packages, whose own files are a room each, their folders, the tests and the benchmarks."""
    folders = [path for package in PACKAGES for path in (ROOT / package).iterdir() if any(path.rglob("*.py"))]
    return sorted([*PACKAGES, *(str(path.relative_to(ROOT)) for path in folders if path.is_dir()), "parity_tests", "benchmarks"])


def share_of_docstrings(package: str) -> float:
    """Return the share of a package's lines that belong to docstrings of modules, classes, functions and fields."""
    texts = [path.read_text(encoding="utf-8") for path in files(package)]
    statements = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    docstrings = [node for node in statements if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in docstrings) / sum(
        len(text.splitlines()) for text in texts
    )


def test_each_room_has_a_budget():
    assert {*BUDGET["lines"]} == {*list_rooms()}


@pytest.mark.parametrize("room", BUDGET["lines"])
def test_a_room_keeps_its_budget(room: str):
    lines, budget = count_lines(room), BUDGET["lines"][room]
    assert lines <= budget, f"{room} has {lines} lines, {budget} are its budget: cut, or raise the budget and say why"


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_keep_their_share(package: str):
    share, most = share_of_docstrings(package), BUDGET["docstrings"][package]
    assert share <= most < 1, f"{share:.1%} of {package} are docstrings, at most {most:.0%}: cut those of internal functions"


if __name__ == "__main__":
    for room in list_rooms():
        print(f"{count_lines(room):7,} of {BUDGET['lines'].get(room, 0):7,}  {room}")
    for package in PACKAGES:
        print(f"{share_of_docstrings(package):7.1%} of {BUDGET['docstrings'][package]:7.0%}  docstrings of {package}")
