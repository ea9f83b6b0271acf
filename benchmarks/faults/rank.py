"""A rank of the ring: it makes a call, then one in which the last rank is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ring_attn_torch import full, ring_attention
from ring_attn_torch.ring.loop import RingPass

from ..ring.problem import TRAVELLING
from ..support.process import argument

TOKENS = 2048


def main(given: dict[str, Any]) -> None:
    rank, ranks, cpu = given["rank"], given["ranks"], given["cpu"]
    device = torch.device("cpu") if cpu else torch.device("cuda", rank)
    if not cpu:
        torch.cuda.set_device(device)
    patience = timedelta(seconds=given["timeout"])
    dist.init_process_group("gloo" if cpu else "nccl", f"file://{given['store']}", patience, ranks, rank)
    shape = (1, 64, 4, 16) if cpu else (1, TOKENS, 8, 128)
    x = torch.randn(shape, device=device, dtype=torch.float32 if cpu else torch.bfloat16, requires_grad=True)
    attend = lambda: ring_attention(x, x, x, mask=full(), strategy=TRAVELLING[given["strategy"]]).float().sum().backward()
    finish = (lambda: None) if cpu else torch.cuda.synchronize
    attend()
    finish()
    dist.barrier()
    steps = RingPass.steps

    def dies(this: RingPass, of: Iterable[Any]) -> Iterator[Any]:
        """Yield the steps of a pass. Die before step 2 of a backward, or before step 1 if there is no other."""
        for number, step in enumerate(steps(this, of), 1):
            if this._name == "backward" and (number == 2 or step.last):
                os.kill(os.getpid(), signal.SIGKILL)
            yield step

    with patch.object(RingPass, "steps", dies if rank == ranks - 1 else steps):
        attend()
    finish()
    print("went on", file=sys.stderr)
    os._exit(0)  # a rank that needs nothing of the killed one ends without waiting for it


if __name__ == "__main__":
    main(argument())
