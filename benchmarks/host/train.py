"""Seconds from ``ring-attn train`` to its first step with an empty kernel cache: Python, imports, data and compilation."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ring_attn_cli.train.loop import LOG, lines
from ring_attn_core.kernels import shipped

CONFIG = """
steps = 1
model = {{dim = 1024, depth = 8, heads = 8, kv_heads = 2, compute_dtype = "bfloat16"}}
data = {{folder = "{texts}", pattern = "*.txt", held_out = "*.txt", length = 8192, batch_size = 1}}
ring = {{ranks = 1}}
"""


def train() -> list[dict[str, Any]]:
    """Return the seconds to the lines "run" and "step" of the log, by framework, for 8 layers of width 1,024 and 8,192 tokens."""
    kernels = "shipped" if shipped.FOLDER.is_dir() else "compiled"
    return [{"framework": framework, "kernels": kernels} | _seconds(framework) for framework in ("torch", "jax")]


def _seconds(framework: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.joinpath("texts").mkdir()
        root.joinpath("texts", "a.txt").write_bytes(os.urandom(40_000).hex().encode())
        root.joinpath("config.toml").write_text(CONFIG.format(texts=root / "texts"))
        command = [sys.executable, "-m", "ring_attn_cli.main", "train", str(root / "config.toml"), "--out", str(root / "run")]
        began, found = time.perf_counter(), {}
        environment = os.environ | {"TRITON_CACHE_DIR": str(root / "cache")}
        with subprocess.Popen([*command, "--framework", framework], env=environment, stdout=subprocess.DEVNULL) as process:
            while "step s" not in found and process.poll() is None:
                time.sleep(0.02)
                path = root / "run" / LOG
                for line in lines(path):
                    found.setdefault(f"{line['kind']} s", time.perf_counter() - began)
            process.terminate()
        return {name: found[name] for name in ("run s", "step s")}
