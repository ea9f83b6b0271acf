"""Ctrl-C reaches a rank that waits for the others' word, long before the group's timeout."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

WAITS = """
import signal, sys, torch, torch.distributed as dist
from datetime import timedelta
from ring_attn_torch import ring_attention

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background has it ignored
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2, timeout=timedelta(minutes=30))
x = torch.ones(1, 4, 2, 8)
print("waiting", flush=True)
if rank == 0:
    ring_attention(x, x, x)
sys.stdin.read()
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_interrupt_ends_the_wait_for_the_other_ranks(tmp_path):
    command = [sys.executable, "-c", WAITS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")], **pipes) for rank in range(2)]
    began = time.monotonic()
    try:
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "waiting\n"
        while b"ring_attn/1/1/0" not in (tmp_path / "store").read_bytes():  # what rank 0 has to say, before it waits for rank 1
            assert ranks[0].poll() is None and time.monotonic() < began + 120
            time.sleep(0.1)
        time.sleep(0.5)
        ranks[0].send_signal(signal.SIGINT)
        _, words = ranks[0].communicate(timeout=600)
        assert "KeyboardInterrupt" in words
        assert "c10d" not in words, "no warnings of timeouts meanwhile"
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
