"""How fast is a ring over the GPUs of a host by each strategy, against torch's context parallelism and one launch of equal work?

    python -m benchmarks.ring [--framework torch jax] [--tokens 8192] [--heads 32] [--kv-heads 8] [--mask causal]
    python -m benchmarks.ring --strategy ring push     only these strategies
    python -m benchmarks.ring --mask documents --layout zigzag balanced
    python -m benchmarks.ring --table                  the calls of the stored result
    python -m benchmarks.ring --framework jax --processes 1 4   JAX in one process, then in one process a GPU (jax.distributed)
    python -m benchmarks.ring --cpu 4 --tokens 256     on four CPU ranks, to see that it runs

bfloat16, random normal. ``tokens`` counts tokens of a GPU, and TFLOP/s those of a GPU: visible pairs only, a backward as
2.5 forwards. All candidates of a call take turns in the same processes (support/turns.py); the slowest rank's time counts, and of
the rounds the median. Each candidate's out is compared with the ring's before it is timed.

"ring without transfers" makes the same launches on the rank's own keys. "one launch of equal work" is one sequence on one GPU
with as many visible pairs: the ring without transfers differs from it by the cost of steps and of smaller launches.

Prediction and measurements: results/README.md.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from ..support import harness
from .problem import LAYOUTS, MASKS, TRAVELLING, Call, Problem

TABLE = [
    Call(2048, 32, 8, "causal"),
    Call(8192, 32, 8, "causal"),
    Call(8192, 64, 8, "causal"),
    Call(32768, 32, 8, "causal"),
    Call(8192, 32, 8, "full"),
    Call(65536, 32, 8, "window"),
    Call(8192, 64, 8, "documents"),
]


def rows(options: Namespace, calls: list[Call]) -> Iterator[dict[str, Any]]:
    """Yield the rate of each candidate of each call."""
    ranks = options.cpu or torch.cuda.device_count()
    dtype = "float32" if options.cpu else "bfloat16"
    for framework in options.framework:
        for call, processes in product(calls, options.processes if framework == "jax" else [ranks]):
            # each in fresh processes: a call that fails loses only its own rows
            problem = Problem([list(call)], options.rounds, not options.no_peers, dtype, options.strategy)
            module = f"benchmarks.ring.in_{framework}"
            found = harness.run_ranks(module, problem, ranks, bool(options.cpu), processes=processes)
            yield from ({"framework": framework, "ranks": ranks, "processes": processes, **row} for row in found[0])


if __name__ == "__main__":
    options = harness.options(
        __doc__,
        framework=[*harness.FRAMEWORKS],
        tokens=8192,
        heads=32,
        kv_heads=8,
        mask={mask: mask == "causal" for mask in MASKS},
        layout={layout: layout == "zigzag" for layout in LAYOUTS},
        strategy=[*TRAVELLING],
        processes=(1,),
        table=False,
        no_peers=False,
        cpu=0,
        rounds=7,
        out="ring-h200-x2",
    )
    sizes = options.tokens, options.heads, options.kv_heads
    asked = [Call(*sizes, mask, layout=layout) for mask in options.mask for layout in options.layout]
    harness.record(__doc__, options.out, "rows", rows(options, TABLE if options.table else asked))
