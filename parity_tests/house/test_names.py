"""A name says what it holds or does: no variable is called ``of`` or ``of_keys``, no function has a participle, as ``joined``."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from .source import files, label

PACKAGES = "ring_attn_core", "ring_attn_jax", "ring_attn_torch", "ring_attn_cli"
PARTICIPLE = re.compile(r"_?([a-z]+ed|drawn|found|given|held|hidden|kept|known|made|seen|sent|taken|written)")

NO_PARTICIPLES = "speed", "striped"  # a noun, and the name of a layout


@cache
def read(package: str) -> tuple[list[str], list[str]]:
    """Return the variables, arguments and fields of a package, and the functions of its modules, each as ``file: name``."""
    variables, functions = [], []
    for file in files(package):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                variables.append(f"{label(file)}: {node.arg}")
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                variables.append(f"{label(file)}: {node.id}")
        functions += [f"{label(file)}: {node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)]
    return variables, functions


@pytest.mark.parametrize("package", PACKAGES)
def test_a_variable_says_what_it_holds(package: str):
    assert not [name for name in read(package)[0] if re.search(r": of(_\w+)?$", name)]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_function_is_named_by_a_verb(package: str):
    names = [name for name in read(package)[1] if PARTICIPLE.fullmatch(name.partition(": ")[2])]
    assert not [name for name in names if name.partition(": ")[2] not in NO_PARTICIPLES]
