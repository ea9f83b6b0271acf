"""The README tells the truth: its programs run as they stand, its commands exist, its features are what the tests prove."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README, re.DOTALL))


def test_the_first_screen_has_a_picture_and_two_commands():
    first = README.splitlines()[:40]
    assert any(line.startswith("![") for line in first)
    assert "make demo" in "\n".join(first)
    assert "make test" in "\n".join(first)


@pytest.mark.parametrize("name", ["jax_quickstart.py", "torch_quickstart.py"])
def test_a_quick_start_runs_as_it_stands_in_at_most_20_lines(name, tmp_path):
    body = PROGRAMS[name]
    assert len(body.strip().splitlines()) <= 20
    pytest.importorskip(name.split("_")[0])
    (tmp_path / name).write_text(body)
    assert "1000" in run(name, name.split("_")[0], tmp_path)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_an_example_trains(framework):
    """The last loss it prints is well below the first."""
    program = str(ROOT / "examples" / f"{framework}_train.py")
    pytest.importorskip(framework)
    done = run(program, framework)
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", done)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1


def run(program: str, framework: str, folder: Path = ROOT) -> str:
    """What a program prints, four processes of it in PyTorch."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=4"] if framework == "torch" else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XLA_FLAGS": ""}
    command = [sys.executable, *launch, program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_make_target_and_file_it_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)) <= targets
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), path


def test_the_table_of_features_is_what_the_tests_prove():
    pytest.importorskip("torch")
    from ..support.feature_table import with_table

    assert with_table(README) == README, "run python -m parity_tests.support.feature_table"
