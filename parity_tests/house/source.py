"""The source files of the house and what a parser sees in each: imports, classes, length."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"os.environ", "os.getenv", "os.putenv", "os.environb"}


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Import(NamedTuple):
    module: str
    line: int
    lazy: bool  # inside a function, or only for the type checker


def imports(tree: ast.AST, package: str) -> Iterator[Import]:
    """Every import of a file in ``package``, relative ones resolved; ``from a import b`` yields a and a.b."""
    for node, lazy in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            yield from (Import(name, node.lineno, lazy) for name in names)
        elif isinstance(node, ast.Call) and _name(node.func).split(".")[-1] in ("import_module", "__import__"):
            names = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from (Import(str(name), node.lineno, lazy) for name in names)


def nodes(tree: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below ``tree``, with True if it does not run when the file is imported."""
    remaining = [(tree, False)]
    while remaining:
        parent, lazy = remaining.pop()
        for child in ast.iter_child_nodes(parent):
            yield child, lazy
            remaining.append((child, lazy or _runs_later(child)))


class Facts(NamedTuple):
    """The facts that the tests need of a file, so that it is parsed once."""

    package: str
    imports: tuple[Import, ...]
    environment: list[str]  # names of os.environ and the like
    at_import: list[str]  # calls of print, and handlers of ImportError, that run when the file is imported
    classes: set[str]
    lines: int


@cache
def facts(path: Path) -> Facts:
    text, package = path.read_text(), ".".join(path.relative_to(ROOT).parent.parts)
    tree = ast.parse(text, str(path))
    environment, at_import, classes = [], [], set()
    for node, lazy in nodes(tree):
        if isinstance(node, ast.Attribute) and _name(node) in ENVIRONMENT:
            environment.append(f"line {node.lineno}: {_name(node)}")
        elif isinstance(node, ast.ClassDef):
            classes.add(node.name)
        elif not lazy and isinstance(node, ast.Call) and _name(node.func) == "print":
            at_import.append(f"line {node.lineno}: print")
        elif not lazy and isinstance(node, ast.ExceptHandler) and node.type:
            errors = ast.unparse(node.type)
            if "ImportError" in errors or "ModuleNotFoundError" in errors:
                at_import.append(f"line {node.lineno}: except {errors}")
    found = tuple(imports(tree, package))
    environment += [f"line {each.line}: {each.module}" for each in found if each.module in ENVIRONMENT]
    return Facts(package, found, environment, at_import, classes, len(text.splitlines()))


def _runs_later(node: ast.AST) -> bool:
    """A function's body, or what only the type checker reads."""
    if isinstance(node, ast.If):
        return _name(node.test).endswith("TYPE_CHECKING")
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _name(node: ast.AST) -> str:
    """a.b.c of a dotted name, "" of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
