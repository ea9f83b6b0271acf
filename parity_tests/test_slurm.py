"""The scripts for Slurm in examples/, with stand-ins for srun and scontrol, and the commands of docs/several_hosts.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .support import corpus
from .support.programs import PAGES, environment

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = {"torch": "slurm_torch.sh", "jax": "slurm_jax.sh"}
SRUN = 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"'
"""Runs the command behind srun's options, as a cluster of one task does."""

SCONTROL = '[ "$1" = show ] && echo 127.0.0.1 || echo "$*" >> "$SAID"'


def run(folder: Path, framework: str, srun: str, restarts: int = 0) -> tuple[int, str, str]:
    """Run a script as Slurm does. Return its exit status, its output, and what it asked of scontrol."""
    (binaries := folder / "bin").mkdir(exist_ok=True)
    python = f'exec {sys.executable} -m torch.distributed.run "$@"', f'exec {sys.executable} "$@"'
    for name, text in {"srun": srun, "scontrol": SCONTROL, "torchrun": python[0], "python": python[1]}.items():
        (binaries / name).write_text(f"#!/bin/bash\n{text}\n")
        (binaries / name).chmod(0o755)
    (folder / "said").write_text("")
    slurm = {"JOB_ID": "7", "JOB_NODELIST": "127.0.0.1", "NNODES": "1", "GPUS_ON_NODE": "2", "RESTART_COUNT": str(restarts)}
    slurm |= {"STEP_NODELIST": "127.0.0.1", "NTASKS": "1", "STEP_NUM_TASKS": "1", "PROCID": "0", "LOCALID": "0"}
    variables = {f"SLURM_{name}": value for name, value in slurm.items()}
    variables |= {"PATH": f"{binaries}:{os.environ['PATH']}", "SAID": str(folder / "said"), "CUDA_VISIBLE_DEVICES": ""}
    variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    command = ["bash", str(EXAMPLES / SCRIPTS[framework]), str(folder / "config.toml")]
    done = subprocess.run(command, cwd=folder, env=environment(variables), capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr, (folder / "said").read_text().strip()


@pytest.mark.parametrize("framework", SCRIPTS)
def test_a_job_that_failed_is_started_again_five_times(tmp_path, framework):
    assert run(tmp_path, framework, "exit 0") == (0, "", "")
    assert run(tmp_path, framework, "exit 1", 4) == (1, "", "requeue 7")
    assert run(tmp_path, framework, "exit 1", 5) == (1, "", "")


@pytest.mark.exhaustive
@pytest.mark.parametrize("framework", SCRIPTS)
def test_a_script_for_slurm_trains(tmp_path, framework):
    pytest.importorskip("rich")
    pytest.importorskip("orbax.checkpoint" if framework == "jax" else "safetensors")
    corpus.write_texts(tmp_path / "data", (700, 61, 1, 900, 100, 3, 1300))
    (tmp_path / "config.toml").write_text(
        "steps = 2\nout = 'run'\n[model]\ndim = 16\ndepth = 1\nheads = 2\nkv_heads = 1\nhidden = 24\n"
        "[data]\nfolder = 'data'\npattern = '**/*.txt'\nheld_out = '**/*.txt'\nlength = 64\n"
        "[ring]\nranks = 2\n[evaluation]\nbatches = 1\n[passkey]\nlengths = []\n"
    )
    status, output, said = run(tmp_path, framework, SRUN)
    assert (status, said) == (0, ""), output
    assert (tmp_path / "run" / "weights" / "model.safetensors").exists()


def test_the_commands_of_the_page_parse():
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGES["docs/several_hosts.md"], re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        subprocess.run(["bash", "-n"], input=block, text=True, check=True, capture_output=True)
    for script in re.findall(r"examples/\w+\.sh", "".join(blocks)):
        assert (EXAMPLES.parent / script).exists()
