"""How fast does a step of training go at the shape of Llama 3 8B, and how much memory does it take?

    python -m benchmarks.training [--framework torch jax] [--layers 32] [--tokens 65536] [--activations offload]

One sequence over all GPUs of this host, causal, zigzag; weights, gradients and AdamW's moments in float32, sharded over the same
GPUs (FSDP2 in PyTorch, an Explicit mesh in JAX); blocks in bfloat16, the loss in chunks, gradients clipped by their global norm.
``tokens`` counts tokens per GPU. Random ids; the median of several steps after a warm-up step. Model TFLOP/s count a token as
``6 N + 3.5 x 2 x length x heads x head_dim x layers``, without recomputation.

Prediction and measurements: results/README.md.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from ring_attn_cli.train.arithmetic import flops_per_token
from ring_attn_core.model.memory import Training, peak_memory, total, weights

from ..support import harness
from .problem import Problem, config_of


def steps(options: Namespace, problem: Problem) -> Iterator[dict[str, Any]]:
    """Yield the median step of each framework, and the formula's memory in GB."""
    config, gpus = config_of(problem), 2 if problem.tiny else torch.cuda.device_count()
    chunks = {"mlp_chunk": problem.mlp_chunk, "loss_chunk": problem.loss_chunk}
    formula = peak_memory(config, Training(gpus=gpus, tokens=problem.tokens, activations=problem.activations, **chunks))
    flops = problem.tokens * flops_per_token(weights(config), problem.tokens * gpus, config)
    for framework in options.framework:
        found = harness.run_ranks(f"benchmarks.training.in_{framework}", problem, gpus, problem.tiny)
        row = {"framework": framework, "layers": problem.layers, **harness.of_steps(found, problem.tokens, flops)}
        memory = {"formula GB": round(formula.peak / 1e9, 2), "formula's host GB": round(total(formula.host) / 1e9, 2)}
        yield row | memory


if __name__ == "__main__":
    sizes: dict[str, Any] = {"layers": 32, "tokens": 65536, "activations": "offload", "mlp_chunk": None, "loss_chunk": 4096}
    options = harness.options(
        __doc__, framework=[*harness.FRAMEWORKS], **sizes, steps=3, tiny=False, out="training-h200-x2"
    )  # tiny: narrow, float32 and on CPUs, to see that it runs
    problem = harness.taken(options, Problem)
    harness.record(__doc__, options.out, "steps", steps(options, problem), problem=problem._asdict())
