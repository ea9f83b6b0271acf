"""How fast does a step of training go at the shape of Llama 3 8B, and how much memory does it take?

    python -m benchmarks.training [--framework torch jax] [--layers 32] [--tokens 65536] [--activations offload]

One sequence over all GPUs of this host, causal, zigzag; weights, gradients and AdamW's moments in float32, sharded over the same
GPUs (FSDP2 in PyTorch, an Explicit mesh in JAX); blocks in bfloat16, the loss in chunks, gradients clipped by their global norm.
``tokens`` counts tokens per GPU. Random ids; the median of several steps after a warm-up step. Model TFLOP/s count a token as
``6 N + 3.5 x 2 x length x heads x head_dim x layers``, without recomputation.

Prediction (2 H200, 65,536 tokens per GPU, 32 layers; all numbers per GPU):
  Time. 1.1e16 operations in products of weights, of which the forward's third is recomputed once: 9.0e15 + 3.0e15 at 650
  TFLOP/s, 16 s (6 N counts 6.3e15); attention, 7.9e15 at 600 forward and 520 backward, 14.4 s; norms, rotary, SwiGLU and the
  casts of weights, each about 20 passes over T d or T f numbers, 1 s; AdamW moves 5 x 16 GB, 0.02 s. In all 24 s, 480 TFLOP/s of
  the 14.3e15 operations that count.
  Memory. Weights, gradients and two moments take 16 GB each, 64; inputs, out and lse of two blocks 2.2; a recomputed block 11;
  a block's weights twice 1.7; a reserve of 4: 83 GB. The host: 32 x 1.1 = 35 GB per GPU.

Measured (results/training-h200-x2.json; torch 2.11, jax 0.11.2, Triton 3.6):
  PyTorch, 32 layers: 21.6 s, 511 TFLOP/s per GPU, 87.8 GB (the formula of ring_attn_core.model.memory gives 95.2 with its reserve
  of 4.3). The first step takes 53 s, mostly for pinning the host's memory.
  JAX, 32 layers: 21.7 s, 508 TFLOP/s, 77.7 GB, without XLA's latency-hiding scheduler. That scheduler sends arrays to the host
  only when they are needed back, and 32 layers do not fit with it; 4 layers take 2.96 s with it and 3.02 without. Two more causes
  held memory: XLA made the zeros that dq is added to, 1.07 GB per layer, for all layers at once (99 GB;
  ring_attn_jax/attend/kernels.py), and an optimization_barrier that ties the fetch to the cotangent makes that scheduler send
  even later (60 GB for 8 layers; not adopted).
  One H200, 2 layers, 655,360 tokens (results/long-h200.json): 50 s, 609 TFLOP/s, 103.5 GB; the formula, with its reserve, 124.8.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ring_attn_cli.train.arithmetic import flops_per_token
from ring_attn_core.model.memory import Training, peak_memory, total, weights

from ..support import report
from ..support.process import run_fresh
from .problem import Problem, config_of

FRAMEWORKS = {"torch": "benchmarks.training.torch_step", "jax": "benchmarks.training.jax_step"}


def measure(framework: str, problem: Problem, gpus: int) -> dict[str, Any]:
    """Return the seconds of the median step, its rates, the largest peak of a GPU in GB, and the formula's memory in GB."""
    config = config_of(problem)
    processes = gpus if framework == "torch" else 1
    found = run_fresh(FRAMEWORKS[framework], {**problem._asdict(), "gpus": gpus}, processes)
    seconds = statistics.median(max(ranks) for ranks in zip(*(rank["seconds"] for rank in found), strict=True))
    flops = problem.tokens * flops_per_token(weights(config), problem.tokens * gpus, config)
    chunks = {"mlp_chunk": problem.mlp_chunk, "loss_chunk": problem.loss_chunk}
    formula = peak_memory(config, Training(gpus=gpus, tokens=problem.tokens, activations=problem.activations, **chunks))
    return {
        "framework": framework,
        "layers": problem.layers,
        "seconds": round(seconds, 3),
        "all seconds": [[round(x, 3) for x in rank["seconds"]] for rank in found],
        "warm-up s": round(max(rank["first"] for rank in found), 1),
        "TFLOP/s a GPU": round(flops / seconds / 1e12, 1),
        "tokens/s a GPU": round(problem.tokens / seconds),
        "peak GB": round(max(rank["peak"] for rank in found) / 1e9, 2),
        "formula GB": round(formula.peak / 1e9, 2),
        "formula's host GB": round(total(formula.host) / 1e9, 2),
        "losses": found[0]["losses"],
    }


def show(cells: list[dict[str, Any]]) -> Table:
    columns = [name for name in cells[0] if name not in ("all seconds", "losses")]
    table = Table(title="a step", title_justify="left")
    for column in columns:
        table.add_column(column)
    for cell in cells:
        table.add_row(*(str(cell[name]) for name in columns))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog=report.program(), description=report.first_line(__doc__))
    parser.add_argument("--framework", nargs="*", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--activations", default="offload")
    parser.add_argument("--mlp-chunk", type=int)
    parser.add_argument("--loss-chunk", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="narrow, float32 and on CPUs: to see that it runs")
    parser.add_argument("--out", default="training-h200-x2", help="name of the result file")
    options = vars(parser.parse_args())
    frameworks, out = options.pop("framework"), options.pop("out")
    problem = Problem(**options)
    gpus = 2 if problem.tiny else torch.cuda.device_count()
    result: dict[str, Any] = {"question": report.first_line(__doc__), **report.environment(), "problem": problem._asdict()}
    if not problem.tiny:
        result["hardware"] = {"gpu": torch.cuda.get_device_name(), "gpus": gpus, **result["hardware"]}
    result["steps"] = []
    for framework in frameworks:
        result["steps"].append(measure(framework, problem, gpus))
        Console(width=120).print(show(result["steps"]))
        print(report.save(out, result))  # after each, so that a later failure loses nothing


if __name__ == "__main__":
    main()
