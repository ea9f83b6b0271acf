"""Tries the packages that pip has installed: runs the tests that touch them, compares them with a lock file, and writes it.

    python -P parity_tests/newest.py requirements/newest-py313.txt [--workers 2] [--report] [options of pytest]

``make newest`` runs it in an environment made for it. ``--report`` says what differs and runs and writes nothing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = (
    *(
        "core/test_cli.py",
        "core/test_packed_plans.py",
        "core/test_doctor.py",
        "core/test_draw.py",
        "core/test_generate_text.py",
        "core/test_train.py",
    ),
    *(
        "core/test_kernels.py",
        "core/test_hopper.py",
        "core/test_hopper_passes.py",
        "core/test_bound_launch.py",
        "core/test_broken_triton.py",
    ),
    *("core/test_weight_files.py", "core/test_weight_names.py", "core/test_rotary.py"),
    *("jax/test_adapters.py", "jax/test_checkpoint.py", "jax/test_kernels.py", "jax/test_layers.py", "jax/test_parallel.py"),
    *("jax/test_check_vma.py", "jax/test_gather.py", "jax/test_generate.py", "jax/test_shard_map.py", "jax/test_sharded.py"),
    "jax/test_tokamax.py",
    *("torch/test_checkpoint.py", "torch/test_dataset.py", "torch/test_gather.py", "torch/test_generate.py"),
    *("torch/test_kernels.py", "torch/test_layers.py", "torch/test_multihead.py"),
    *("torch/test_op.py", "torch/test_opcheck.py", "torch/test_parallel.py"),
    *("torch/test_vendor.py", "torch/test_mistakes.py"),
    *("torch/test_transformers_documents.py", "torch/test_transformers_generate.py"),
    *("torch/test_transformers_interfaces.py", "torch/test_transformers_memory.py"),
    *("torch/test_transformers_models.py", "torch/test_transformers_parallel.py", "torch/test_transformers_refusals.py"),
    *("torch/test_transformers_accelerate.py", "torch/test_transformers_training.py", "jax/test_packed_steps.py"),
    *("claims/test_layers.py", "claims/test_models.py", "test_demo.py", "test_generate_cli.py", "test_train_parity.py"),
    *("test_weights_parity.py", "house/test_annotations.py", "house/test_imports.py"),
)
"""Tests that call other packages: Hugging Face's, layers, training, weights, kernels, commands."""

OURS = "ring-attn"
LEFT_OUT = re.compile(r"(nvidia|cuda)[-_]|jax[-_]cuda|(pip|ring-attn)$")
"""CUDA's libraries, which a build of torch asks for; the plugin of jaxlib's own version; packages that are not pinned."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lock", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", action="store_true")
    asked, of_pytest = parser.parse_known_args()
    text = asked.lock.read_text()
    pinned, found = pins(text), pins(installed())
    print(report(asked.lock, pinned, found))
    if asked.report:
        return 0
    failed = [name for name, command in checks(asked.workers, of_pytest).items() if run(name, command)]
    if failed:
        print(f"{asked.lock} stays as it is: {' and '.join(failed)} failed. .ci/run goes by the lock files alone: CI is not red")
        print("mend what fails, or keep a release out: make newest KEEP=<package>")
        return 1
    if pinned == found:
        print(f"all passed, and {asked.lock} pins what is newest")
        return 0
    asked.lock.write_text(locked(text, found))
    print(f"all passed: {asked.lock} pins these now. .ci/run tests with the lock files only: run it, then commit the file")
    return 0


def pins(text: str) -> dict[str, str]:
    """Return the version of each package that ``pip freeze`` or a lock file lists, without a build's suffix such as +cpu."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    listed = dict(line.split("==", 1) for line in lines if "==" in line)
    return {name: version.partition("+")[0] for name, version in listed.items() if not LEFT_OUT.match(name)}


def installed() -> str:
    command = sys.executable, "-m", "pip", "--disable-pip-version-check", "freeze", "--exclude", OURS
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def report(lock: Path, pinned: dict[str, str], found: dict[str, str]) -> str:
    """Return a table of the packages whose version differs: package, pinned, found."""
    names = sorted((name for name in {*pinned, *found} if pinned.get(name) != found.get(name)), key=str.lower)
    if not names:
        return f"{len(found)} packages are found as {lock} pins them"
    rows = [("package", "pinned", "found"), *((name, pinned.get(name, "-"), found.get(name, "-")) for name in names)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*table, f"{len(names)} of {len(found)} packages differ from {lock}"])


def locked(text: str, found: dict[str, str]) -> str:
    """Return the lock file ``text`` with what was found in place of its pins; the comment on top stays."""
    head = [line for line in text.splitlines() if line.startswith("#")]
    return "\n".join([*head, *(f"{name}=={found[name]}" for name in sorted(found, key=str.lower))]) + "\n"


def checks(workers: int, options: list[str]) -> dict[str, list[str]]:
    """Return the commands that must pass, by name."""
    python, tests = [sys.executable, "-m"], [str(Path("parity_tests", name)) for name in TESTS]
    return {
        "ruff": [*python, "ruff", "check", "."],
        "ruff's format": [*python, "ruff", "format", "--check", "."],
        "pyright": [*python, "pyright", "--pythonpath", sys.executable],
        "tests": [*python, "pytest", *tests, "-n", str(workers), "--dist", "loadfile", *options],
    }


def run(name: str, command: list[str]) -> int:
    print(f"=== {name}", flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
