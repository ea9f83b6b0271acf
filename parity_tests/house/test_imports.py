"""The dependency direction and the house rules that a parser can see, file by file.

    parity_tests, benchmarks, examples -> ring_attn_cli -> ring_attn_jax | ring_attn_torch
        -> ring_attn_core: kernels | model | variants | reference -> problem | data -> plan -> runs, masks, layouts, dropout

Nothing is imported here, so this runs where no framework is installed.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterable

import pytest

from .source import ROOT, Import, facts, files, imports, label

PACKAGES = ("ring_attn_core", "ring_attn_jax", "ring_attn_torch", "ring_attn_cli")
ABOVE = ("parity_tests", "benchmarks", "examples")

CORE, KERNELS, CLI = "ring_attn_core", "ring_attn_core.kernels", "ring_attn_cli"
HOUSE = (
    ABOVE,
    (CLI,),
    ("ring_attn_jax", "ring_attn_torch"),
    (KERNELS, "ring_attn_core.model", "ring_attn_core.variants", "ring_attn_core.reference"),
    ("ring_attn_core.problem", "ring_attn_core.data"),
    ("ring_attn_core.plan",),
    (CORE,),
)
"""The floors of the house, from the top: a room uses itself and the floors below it, and no other room of its floor."""

ROOMS = (
    ("transformers", "diffusers", "torchtitan"),
    ("training",),
    ("layers",),
    ("inference",),
    ("variants",),
    ("functional",),
    ("sharded",),
    ("data",),
    ("block", "recurrence"),
    ("call",),
    ("ring",),
    ("attend",),
    ("axes",),
)
"""The same within each of the two packages; files and folders of one floor may use each other, as long as there is no circle."""

JAX, TORCH = {"jax", "jaxlib", "flax", "optax"}, {"torch"}
NOT_FOR = {CORE: JAX | TORCH, "ring_attn_jax": TORCH, "ring_attn_torch": JAX}

AT_ONCE = {KERNELS: {"triton"}, "ring_attn_core.reference": {"numpy"}}
"""The modules that a file of the core may import at module level besides the standard library."""

CLI_AT_ONCE = {CORE, "ring_attn_core.plan", CLI, "typer", "rich"}
"""The modules that the command's files may import so, the rest inside functions. The demo imports what it shows."""


def part_of(module: str) -> str | None:
    """The room of the house that a module belongs to: of those that begin its name, the longest."""
    rooms = [room for floor in HOUSE for room in floor if module == room or module.startswith(room + ".")]
    return max(rooms, key=len, default=None)


def may_use(room: str, other: str) -> bool:
    floor = {each: at for at, rooms in enumerate(HOUSE) for each in rooms}
    return room == other or floor[room] < floor[other] or (room in ABOVE and other in ABOVE)


def direction_breaches(found: Iterable[Import], package: str) -> list[str]:
    """Imports of a file in ``package`` that run upward, or that bring what the file should not need."""
    room = part_of(package)
    assert room is not None
    whose = room.split(".")[0]
    breaches = []
    for module, line, lazy in found:
        used, top = part_of(module), module.split(".")[0]
        if used is not None:
            wrong = not may_use(room, used)
        else:
            wrong = top in NOT_FOR.get(whose, ()) or (top == "triton" and whose in PACKAGES and room != KERNELS and whose != CLI)
            if whose == CORE and not lazy:
                wrong = wrong or top not in AT_ONCE.get(room, set()) | sys.stdlib_module_names
        if package == CLI and not lazy:
            wrong = wrong or (used or top) not in CLI_AT_ONCE | sys.stdlib_module_names
        if wrong:
            breaches.append(f"line {line}: {room} must not import {module}" + ("" if lazy else " at module level"))
    return breaches


FACES = {ROOT / CORE / "__init__.py", ROOT / CORE / "modules.py"}
"""The files in which the core shows users the names of any floor."""


@pytest.mark.parametrize("folder", [*PACKAGES, *ABOVE])
def test_imports_follow_the_direction(folder: str):
    found = {label(path): direction_breaches(facts(path).imports, facts(path).package) for path in {*files(folder)} - FACES}
    assert {name: breaches for name, breaches in found.items() if breaches} == {}


@pytest.mark.parametrize(
    ("package", "source"),
    [
        (CORE, "import numpy"),
        (CORE, "from .problem.problem import Problem"),
        ("ring_attn_core.plan", "from ..problem import checks"),
        ("ring_attn_core.problem", "from ..kernels import launch"),
        ("ring_attn_core.model", "from ..kernels import launch"),
        (CORE, "def f():\n    import ring_attn_jax.call"),
        (CORE, "class A:\n    import rich"),
        (CORE, "def f():\n    import triton"),
        (CORE, "def f():\n    import jax.numpy"),
        (CORE, "from ring_attn_cli.demo import text"),
        (KERNELS, "from ring_attn_torch import call"),
        (KERNELS, "def f():\n    import torch"),
        ("ring_attn_jax", "def f():\n    from torch import nn"),
        ("ring_attn_jax", "import importlib\nimportlib.import_module('ring_attn_torch')"),
        ("ring_attn_torch", "from jax import numpy"),
        ("ring_attn_torch", "import triton"),
        ("ring_attn_torch", "from parity_tests.support import cases"),
        (CLI, "from parity_tests.support import cases"),
        (CLI, "import ring_attn_jax"),
        (CLI, "import jax"),
        (CLI, "from ring_attn_core.kernels import backends"),
    ],
)
def test_a_breach_of_the_direction_is_seen(package: str, source: str):
    assert direction_breaches(imports(ast.parse(source), package), package)


@pytest.mark.parametrize("source", ["import ring_attn_jax", "import jax", "from ring_attn_core.kernels import backends"])
def test_the_command_may_import_inside_a_function(source: str):
    assert not direction_breaches(imports(ast.parse(f"def command():\n    {source}"), CLI), CLI)


def modules_used(package: str) -> dict[str, set[str]]:
    """Return the modules of a package that each of its modules imports, also inside functions."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files(package)}
    graph = {}
    for path, name in names.items():
        graph[name] = {found.module for found in facts(path).imports} & set(names.values()) - {name}
        graph[name] = {used for used in graph[name] if not name.startswith(used + ".")}  # its own folder comes first anyway
    return graph


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_of_a_package_import_each_other_in_a_circle(package: str):
    tuple(graphlib.TopologicalSorter(modules_used(package)).static_order())  # CycleError names the circle


@pytest.mark.parametrize("package", ["ring_attn_jax", "ring_attn_torch"])
def test_the_rooms_of_a_package_look_only_downwards(package: str):
    level = {room: depth for depth, rooms in enumerate(ROOMS) for room in rooms}
    room_of = lambda module: module.split(".")[1] if "." in module else ""
    pairs = {(room_of(a), room_of(b)) for a, used in modules_used(package).items() for b in used}
    assert [(a, b) for a, b in sorted(pairs) if a != b and a and b and level[a] > level[b]] == []


def test_the_core_needs_the_standard_library_only():
    """Apart from the kernels themselves, which are Triton, and the reference, which is numpy."""
    kernels = files("ring_attn_core/kernels/portable", "ring_attn_core/kernels/hopper")
    needing = {path for path in kernels if path.stem not in ("launches", "supports", "__init__")}
    needing |= {*files("ring_attn_core/reference")}
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files(CORE) if path not in needing]
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + "\n".join(f"import {module}" for module in modules)
    bare = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert bare.returncode == 0, bare.stderr
    assert bare.stdout == ""


HEAVY = "torch.distributed.tensor", "torch._dynamo", "triton", "matplotlib", "rich", "transformers", "sympy", "flax", "optax"


@pytest.mark.parametrize(("package", "framework"), [("ring_attn_torch", "torch"), ("ring_attn_jax", "jax")])
def test_a_package_imports_nothing_heavy_beyond_its_framework(package: str, framework: str):
    """A second's worth of modules that most programs never use is imported where it is used."""
    program = f"import sys, {framework}; before = set(sys.modules); import {package}; print(*set(sys.modules) - before)"
    new = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in new if any(name == heavy or name.startswith(heavy + ".") for heavy in HEAVY)]
    assert len([name for name in new if not name.startswith("ring_attn_")]) < 40


OF_TORCHRUN = "ring_attn_cli/train/torchrun.py"
"""The one file that reads the environment: torchrun states what it knows nowhere else."""


def test_the_environment_is_neither_read_nor_written():
    touching = {label(path): found for path in files(*PACKAGES) if (found := facts(path).environment)}
    assert {*touching} == {OF_TORCHRUN}, touching


def test_importing_prints_nothing_and_tries_no_chain_of_imports():
    assert {label(path): found for path in files(*PACKAGES) if (found := facts(path).at_import)} == {}


def test_a_file_stays_short_enough_to_read():
    limit = lambda path: 450 if ROOT / "ring_attn_core" / "kernels" in path.parents else 300
    lines = {path: facts(path).lines for path in files(*PACKAGES, *ABOVE)}
    assert {label(path): count for path, count in lines.items() if count > limit(path)} == {}


def test_no_two_classes_have_one_name():
    """A class stands once, or once in each framework. A torchtitan module has a nested ``Config``, by its convention."""
    modules: dict[str, list[str]] = {}
    for path in files(*PACKAGES):
        inside = str(path.relative_to(ROOT)).replace("ring_attn_jax", "*").replace("ring_attn_torch", "*")
        for name in facts(path).classes - {"Config"}:
            modules.setdefault(name, []).append(inside if inside[0] == "*" else str(path))
    twice = {name: found for name, found in modules.items() if len(found) > 1 + all(module[0] == "*" for module in found)}
    assert twice == {}
