"""How soon does a long prompt's first token come, and how fast the next ones, at the shape of Llama 3 8B?

    python -m benchmarks.serving [--framework torch jax] [--layers 32] [--tokens 524288] [--chunk 65536]

``RingTransformer.generate`` on one prompt over all GPUs of this host; random weights in bfloat16, replicated on each GPU, and
random ids. The same run measures the rates of one GPU: attention's forward over two chunks, a product of the MLP, and a copy.

    of the kernels' rate   seconds of attention's and the weights' operations at those two rates, over those to the first token
    over reading           seconds of a step over those of reading the weights and a GPU's cache at the copy's rate

Prediction and measurements: results/README.md.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from ..support import harness
from .problem import Problem, prefill_flops, step_bytes


def prompts(options: Namespace, problem: Problem, rates: dict[str, float] | None) -> Iterator[dict[str, Any]]:
    """Yield the times of the slowest rank of each framework, and their ratios to the ideal at the rates of one GPU."""
    gpus = 2 if problem.tiny else torch.cuda.device_count()
    attention, products = prefill_flops(problem)
    for framework in options.framework:
        found = harness.run_ranks(f"benchmarks.serving.in_{framework}", problem, gpus, problem.tiny)
        first, step = (max(rank[name] for rank in found) for name in ("first token", "step"))
        cell = {
            "framework": framework,
            "gpus": gpus,
            "first token s": round(first, 2),
            "TFLOP/s a GPU": round((attention + products) / gpus / first / 1e12, 1),
            "step ms": round(step * 1e3, 3),
            "worst step ms": round(max(rank["worst"] for rank in found) * 1e3, 3),
            "peak GB": round(max(rank["peak"] for rank in found) / 1e9, 2),
            "chunks s": [round(x, 2) for x in found[0]["chunks"]],
            "same tokens": all(rank["tokens"] == found[0]["tokens"] for rank in found),
        }
        if rates is not None:
            ideal = (attention / rates["attention"] + products / rates["product"]) / gpus
            reading = sum(step_bytes(problem, gpus)) / rates["copy"]
            cell |= {"of the kernels' rate": round(ideal / first, 3), "over reading": round(step / reading, 3)}
        yield cell


if __name__ == "__main__":  # tiny: narrow, float32 and on CPUs, to see that it runs
    sizes = {"layers": 32, "tokens": 524288, "chunk": 65536, "new": 64, "tiny": False}
    options = harness.options(__doc__, framework=[*harness.FRAMEWORKS], **sizes, out="serving-h200")
    problem = harness.taken(options, Problem)
    rates = None if problem.tiny else harness.run_ranks("benchmarks.serving.rates", problem, 1, cpu=False)[0]
    facts = {"problem": problem._asdict()} | ({} if rates is None else {"rates": rates})
    harness.record(__doc__, options.out, "prompts", prompts(options, problem, rates), **facts)
