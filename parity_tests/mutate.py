"""Breaks the library on purpose, one line at a time: each break must turn the test that is named for it red.

    python -P parity_tests/mutate.py [--workers N] [name ...]

The breaks stand in ``parity_tests/breaks``, a file for each room of the house. Each is made in a copy of the checkout, where its
test runs alone. A ``name`` is a room, or a part of a break's name; without one all breaks are made.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import queue
import re
import shutil
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from parity_tests.support.warm import CACHE

ROOT = Path(__file__).parent.parent
PATIENCE = 600
"""Seconds after which a test that hangs has noticed the break."""


@dataclass(frozen=True)
class Break:
    """Replace ``old``, which stands once in ``file``, by ``new``: ``test`` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str
    room: str


def breaks() -> list[Break]:
    """Read every break, in the order of the files."""
    rooms = sorted((ROOT / "parity_tests/breaks").glob("*.toml"))
    return [Break(**each, room=file.stem) for file in rooms for each in tomllib.loads(file.read_text())["break"]]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1), help="two a core: many tests wait for ranks")
    parser.add_argument("name", nargs="*", help="a part of a break's name, or its room")
    given = parser.parse_args(arguments)
    named = [b for b in breaks() if not given.name or any(name in b.name or name == b.room for name in given.name)]
    lacking = {b.name: package for b in named if (package := lacks(b))}
    for name, package in lacking.items():
        print(f"LEFT OUT {name}: its test needs {package}")
    chosen = [b for b in named if b.name not in lacking]
    tests = list(dict.fromkeys(b.test for b in chosen))
    if run(ROOT, "-n", str(os.cpu_count()), "--dist", "loadfile", *tests) != 0:
        print("NOT BROKEN, and already red: see above")
        return 1
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.workers) as workers:
        copies: queue.Queue[Path] = queue.Queue()
        for i in range(given.workers):
            copy = Path(folder) / str(i)
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "demo-output", "build", "dist"))
            copies.put(copy)
        survivors = [b for b, red in zip(chosen, workers.map(lambda b: noticed(b, copies), chosen), strict=True) if not red]
    for b in survivors:
        print(f"SURVIVED {b.name}: {b.file}, {b.test}")
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} breaks were noticed")
    return 1 if survivors else 0


def lacks(broken: Break) -> str | None:
    """Return a package that the file of the break's test needs and this environment lacks, or None."""
    needed = re.findall(
        r'^(?:\w+ = )?pytest\.importorskip\("(\w+)', (ROOT / broken.test.partition("::")[0]).read_text(), re.MULTILINE
    )
    return next((package for package in needed if find_spec(package) is None), None)


def noticed(broken: Break, copies: queue.Queue[Path]) -> bool:
    """Return whether the break's test fails in one of the copies, which is whole again afterwards."""
    copy, began = copies.get(), time.perf_counter()
    file = copy / broken.file
    text = file.read_text()
    try:
        file.write_text(text.replace(broken.old, broken.new))
        red = run(copy, "-x", *of_its_package(broken), broken.test) == 1
    finally:
        file.write_text(text)
        copies.put(copy)
    print(f"{'red ' if red else 'GREEN'} {time.perf_counter() - began:5.1f} s  {broken.room}: {broken.name}", flush=True)
    return red


def of_its_package(broken: Break) -> list[str]:
    """Return pytest's selection of the framework whose package is broken, from a claim of both."""
    package = re.match(r"ring_attn_(jax|torch)/", broken.file)
    return ["-k", package[1]] if package and broken.test.startswith("parity_tests/claims/") and "[" not in broken.test else []


def run(folder: Path, *arguments: str) -> int:
    """Return pytest's exit status: 0 green, 1 red, anything else: it did not come to testing, and is printed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch.distributed", "jax", "flax.nnx", "optax"])
    with tempfile.NamedTemporaryFile() as printed:
        process = context.Process(target=_pytest, args=(str(folder), printed.name, arguments))
        process.start()
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            return 1
        if process.exitcode not in (0, 1) or (folder == ROOT and process.exitcode):
            print(Path(printed.name).read_text())
    return process.exitcode


def _pytest(folder: str, printed: str, arguments: tuple[str, ...]) -> None:
    """Run pytest in ``folder``, whose packages come before those that are installed."""
    for stream in (1, 2):
        os.dup2(os.open(printed, os.O_WRONLY | os.O_APPEND), stream)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    sys.exit(importlib.import_module("pytest").main(["-q", "-p", "no:cacheprovider", *arguments]))


if __name__ == "__main__":
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1"} | CACHE
    sys.exit(main(sys.argv[1:]))
