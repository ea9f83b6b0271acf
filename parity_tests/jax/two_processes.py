"""Runs a program in two JAX processes of two devices each, joined by ``jax.distributed``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..support.warm import free_port

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


def said_by_two(source: str, folder: Path) -> list[list[str]]:
    """Run ``source`` in ``folder`` with the coordinator's address and the process's index as arguments.

    Return the lines that each process has written to its file ``said-0`` or ``said-1``. Both must end without an error.
    """
    program = folder / "program.py"
    program.write_text(source)
    address = f"127.0.0.1:{free_port()}"
    log: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": folder}
    command = [sys.executable, str(program), address]
    started = [subprocess.Popen([*command, str(process)], env=os.environ | ENVIRONMENT, **log) for process in range(2)]
    try:
        logs = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], logs
    return [(folder / f"said-{process}").read_text().splitlines() for process in range(2)]
