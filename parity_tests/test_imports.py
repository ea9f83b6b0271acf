"""The dependency direction and the house rules that a parser can see, file by file.

    parity_tests, benchmarks, examples -> ring_attn_jax | ring_attn_torch -> ring_attn_core.kernels -> ring_attn_core.*

ring_attn_core/cli.py, doctor.py and demo/ are the command: they stand above the packages, and nothing in these uses them.
Nothing is imported here, so this runs where no framework is installed.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ring_attn_core", "ring_attn_jax", "ring_attn_torch")
ABOVE = ("parity_tests", "benchmarks", "examples")

CORE = "ring_attn_core"
KERNELS = "ring_attn_core.kernels"
DEMO = "ring_attn_core.demo"
MAY_USE = {
    CORE: {CORE},
    KERNELS: {CORE, KERNELS},
    "ring_attn_jax": {CORE, KERNELS, "ring_attn_jax"},
    "ring_attn_torch": {CORE, KERNELS, "ring_attn_torch"},
    DEMO: {KERNELS, DEMO, *PACKAGES},
    **{folder: {KERNELS, DEMO, *PACKAGES, *ABOVE} for folder in ABOVE},
}
JAX, TORCH = {"jax", "jaxlib", "flax", "optax"}, {"torch"}
NOT_FOR = {CORE: JAX | TORCH, KERNELS: JAX | TORCH, "ring_attn_jax": TORCH, "ring_attn_torch": JAX}

# What a core file may import at module level besides the standard library. The command imports the rest inside functions.
CORE_EXTRAS = {"oracle.py": {"numpy"}, "tolerance.py": {"numpy"}}
CLI = ("cli.py", "doctor.py")
CLI_AT_ONCE = {CORE, DEMO, "typer", "rich"}

# In each package, who may import whom: only rightwards. Files not named here are free, as long as there is no circle.
INSIDE = [["transformer"], ["layers"], ["api"], ["ring"], ["comm", "attend"], ["blockwise", "launch"]]


class Import(NamedTuple):
    module: str
    line: int
    lazy: bool  # inside a function, or only for the type checker


def imports(tree: ast.AST, package: str) -> Iterator[Import]:
    """Every import of a file in ``package``, relative ones resolved; ``from a import b`` yields a and a.b."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                parents = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
                base = ".".join([*parents, *([child.module] if child.module else [])])
                names = [base, *(f"{base}.{alias.name}" for alias in child.names)]
                yield from (Import(name, child.lineno, lazy) for name in names)
            elif isinstance(child, ast.Call) and _name(child.func).split(".")[-1] in ("import_module", "__import__"):
                names = [argument.value for argument in child.args[:1] if isinstance(argument, ast.Constant)]
                yield from (Import(str(name), child.lineno, lazy) for name in names)
            yield from walk(child, lazy or _runs_later(child))

    yield from walk(tree, False)


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the file is imported."""
    for child in ast.iter_child_nodes(tree):
        yield child
        if not _runs_later(child):
            yield from at_import(child)


def _runs_later(node: ast.AST) -> bool:
    """A function's body, or what only the type checker reads."""
    if isinstance(node, ast.If):
        return _name(node.test).endswith("TYPE_CHECKING")
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _name(node: ast.AST) -> str:
    """a.b.c of a dotted name, "" of anything else."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def part_of(module: str) -> str | None:
    """Which part of this repository a module belongs to."""
    parts = module.split(".")
    return next((part for part in (".".join(parts[:2]), parts[0]) if part in MAY_USE), None)


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parse(path: Path) -> tuple[ast.Module, str]:
    return ast.parse(path.read_text(), str(path)), ".".join(path.relative_to(ROOT).parent.parts)


def direction_breaches(tree: ast.AST, package: str, file: str = "") -> list[str]:
    """Imports of ``package/file`` that go against the direction."""
    part = part_of(package)
    assert part is not None
    breaches = []
    for module, line, lazy in imports(tree, package):
        used, top = part_of(module), module.split(".")[0]
        if part == CORE and file in CLI:
            wrong = not lazy and (used or top) not in CLI_AT_ONCE | sys.stdlib_module_names
        elif used is not None:
            wrong = used not in MAY_USE[part]
        else:
            wrong = top in NOT_FOR.get(part, ()) or (top == "triton" and part in PACKAGES)
            if part in (CORE, KERNELS) and not lazy:
                extras = {"triton"} if part == KERNELS else CORE_EXTRAS.get(file, set())
                wrong = wrong or top not in extras | sys.stdlib_module_names
        if wrong:
            breaches.append(f"line {line}: {part} must not import {module}" + ("" if lazy else " at module level"))
    return breaches


@pytest.mark.parametrize("path", files(*PACKAGES, *ABOVE), ids=label)
def test_imports_follow_the_direction(path: Path):
    assert direction_breaches(*parse(path), path.name) == []


@pytest.mark.parametrize(
    ("package", "source"),
    [
        (CORE, "import numpy"),
        (CORE, "from .kernels.problem import Problem"),
        (CORE, "def f():\n    import ring_attn_jax.api"),
        (CORE, "class A:\n    import rich"),
        (CORE, "def f():\n    import triton"),
        (CORE, "def f():\n    import jax.numpy"),
        (CORE, "from .demo import text"),
        (KERNELS, "from ring_attn_torch import api"),
        (KERNELS, "def f():\n    import torch"),
        ("ring_attn_jax", "def f():\n    from torch import nn"),
        ("ring_attn_jax", "import importlib\nimportlib.import_module('ring_attn_torch')"),
        ("ring_attn_torch", "from jax import numpy"),
        ("ring_attn_torch", "import triton"),
        ("ring_attn_torch", "from parity_tests import cases"),
        (DEMO, "from parity_tests import cases"),
    ],
)
def test_a_breach_of_the_direction_is_seen(package: str, source: str):
    assert direction_breaches(ast.parse(source), package)


@pytest.mark.parametrize("file", CLI)
@pytest.mark.parametrize("source", ["import ring_attn_jax", "import jax", "from .kernels import backends"])
def test_the_command_imports_frameworks_only_when_it_needs_them(source: str, file: str):
    assert direction_breaches(ast.parse(source), CORE, file)
    assert not direction_breaches(ast.parse(f"def command():\n    {source}"), CORE, file)


@pytest.mark.parametrize("package", ["ring_attn_jax", "ring_attn_torch"])
def test_a_package_has_no_circle_and_its_ring_looks_only_downwards(package: str):
    graph: dict[str, set[str]] = {}
    for path in files(package):
        tree, _ = parse(path)
        used = {found.module.split(".")[1] for found in imports(tree, package) if found.module.startswith(package + ".")}
        graph[path.stem] = {module for module in used if (ROOT / package / f"{module}.py").exists()}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the circle

    level = {module: depth for depth, modules in enumerate(INSIDE) for module in modules}
    upwards = [(a, b) for a, used in graph.items() for b in used if a in level and b in level and level[a] >= level[b]]
    assert upwards == []


def test_the_core_needs_the_standard_library_only():
    modules = []
    for path in files(CORE):
        tree, package = parse(path)
        needs_triton = any(found.module.split(".")[0] == "triton" and not found.lazy for found in imports(tree, package))
        if part_of(package) != DEMO and path.name not in {*CLI, *CORE_EXTRAS} and not needs_triton:
            modules.append(".".join(path.relative_to(ROOT).with_suffix("").parts))
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + "\n".join(f"import {module}" for module in modules)
    bare = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert bare.returncode == 0, bare.stderr
    assert bare.stdout == ""


@pytest.mark.parametrize("path", files(*PACKAGES), ids=label)
def test_the_environment_is_neither_read_nor_written(path: Path):
    tree, package = parse(path)
    touched = [found.module for found in imports(tree, package) if found.module in ("os.environ", "os.getenv", "os.putenv")]
    touched += [_name(node) for node in ast.walk(tree) if _name(node) in ("os.environ", "os.getenv", "os.putenv", "os.environb")]
    assert touched == []


@pytest.mark.parametrize("path", files(*PACKAGES), ids=label)
def test_importing_prints_nothing_and_tries_no_chain_of_imports(path: Path):
    tree, _ = parse(path)
    prints = [node.lineno for node in at_import(tree) if isinstance(node, ast.Call) and _name(node.func) == "print"]
    caught = [ast.unparse(node.type) for node in at_import(tree) if isinstance(node, ast.ExceptHandler) and node.type]
    guesses = [errors for errors in caught if "ImportError" in errors or "ModuleNotFoundError" in errors]
    assert prints == []
    assert guesses == []


@pytest.mark.parametrize("path", files(*PACKAGES, *ABOVE), ids=label)
def test_a_file_stays_short_enough_to_read(path: Path):
    limit = 450 if path.parent == ROOT / "ring_attn_core" / "kernels" else 300
    assert len(path.read_text().splitlines()) <= limit
