"""The README tells the truth: its programs run as they stand, its commands exist, its table names every later feature."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ring_attn_core.kernels.problem import LATER

ROOT = Path(__file__).parent.parent
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
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=4"] if name.startswith("torch") else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XLA_FLAGS": ""}
    command = [sys.executable, *launch, name]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "1000" in done.stdout


def test_every_make_target_and_file_it_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)) <= targets
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), path


def test_every_argument_that_does_not_work_yet_is_listed():
    for name in LATER:
        assert f"`{name}`" in README, name
