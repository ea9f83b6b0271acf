"""How soon, and with what words, do the other ranks of a ring end when one is killed in a step?

    python -m benchmarks.faults [--strategy ring push] [--waiting stream host] [--timeout 30]
    python -m benchmarks.faults --cpu 4    on four CPU ranks by gloo

One process a GPU, without torchrun, whose agent would end the others. The last rank kills itself by SIGKILL in the backward,
before step 2 if the strategy has several. All cases run at once. "host" sets TORCH_NCCL_BLOCKING_WAIT=1: a rank then waits on
the host for each transfer, so that an error can name ranks and step. ``timeout``: of the group, in seconds.

Prediction and measurements: results/README.md.
"""

from __future__ import annotations

import re
import tempfile
from argparse import Namespace
from itertools import product
from typing import Any

import torch

from ..ring.problem import TRAVELLING
from ..support import harness
from .watch import Case, watch

WAITING = {"stream": "0", "host": "1"}


def cases(options: Namespace, folder: str) -> list[Case]:
    """Return the cases that can run: "push" makes no transfers of torch.distributed, and needs GPUs."""
    ranks, found = options.cpu or torch.cuda.device_count(), []
    for strategy, waiting in product(options.strategy, options.waiting):
        if strategy != "push" or not (options.cpu or waiting == "host"):
            given = {"strategy": strategy, "waiting": waiting, "timeout": options.timeout, "cpu": bool(options.cpu)}
            found.append(Case(given, f"{folder}/{len(found)}", ranks, {"TORCH_NCCL_BLOCKING_WAIT": WAITING[waiting]}))
    return found


def row(case: Case) -> dict[str, Any]:
    """Return how the survivors of a case ended."""
    *survivors, victim = range(case.ranks)
    words = [case.last_words(rank) for rank in survivors]
    named = lambda pattern: sum(bool(re.search(pattern, line)) for line in words)
    return {
        "strategy": case.given["strategy"],
        "waiting": case.given["waiting"],
        "exit codes": " ".join(str(code) for code in case.codes),
        "seconds": round(max(case.ended[rank] - case.ended[victim] for rank in survivors), 1),
        "name the rank": named(rf"rank {victim}\b"),
        "name the step": named("ring step"),
        "words": words,
    }


if __name__ == "__main__":  # patience: seconds after which a process that still runs is killed; its exit code is None
    sizes = {"timeout": 30, "patience": 180, "cpu": 0, "out": "faults-h100-x4"}
    options = harness.options(__doc__, strategy=[*TRAVELLING], waiting=[*WAITING], **sizes)
    with tempfile.TemporaryDirectory(prefix="ring-attn-") as folder:
        harness.record(__doc__, options.out, "rows", map(row, watch(cases(options, folder), options.patience)))
