"""How fast does a model of transformers train over a ring, at the shapes that people have?

    python -m benchmarks.hugging_face [--rows qwen3-8b:ring:12:131072:offload gpt-oss-20b:ring:4:65536 ...]
    python -m benchmarks.hugging_face.tested_models         compares tiny models of all classes with eager attention: no speed

A row is model:attention:layers:tokens per GPU, with ``:offload`` if the kept activations are offloaded to host memory. One
sequence over all GPUs of this host, zigzag; weights, gradients and AdamW's moments in float32, sharded over the same GPUs
(FSDP2); layers computed in bfloat16 and recomputed in the backward; gradients clipped by their global norm. "ring" enters
``sequence_parallel`` with loss_chunk=4096. "accelerate" is transformers' sdpa under accelerate's context parallelism, with a
loss that holds all logits of a GPU's tokens. Any other attention is transformers' own, with a loss that holds all logits, and
runs on one GPU. Random weights and ids; the median of several steps after a warm-up step. Model TFLOP/s count a token's
operations in products and in visible pairs (problem.py), and nothing for recomputation.

Prediction and measurements: results/README.md.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from ..support import harness
from .problem import Problem

ROWS = (
    "qwen3-8b:ring:12:131072:offload",
    "qwen3-8b:ring:4:32768",
    "qwen3-8b:sdpa:4:32768",
    "gpt-oss-20b:ring:4:65536",
)


def steps(options: Namespace) -> Iterator[dict[str, Any]]:
    """Yield the median step of each row."""
    for row in options.rows:
        model, attention, layers, tokens, *rest = row.split(":")
        problem = Problem(model, attention, int(layers), int(tokens), options.steps, rest == ["offload"], options.tiny)
        gpus = 1 if attention not in ("ring", "accelerate") else 2 if options.tiny else torch.cuda.device_count()
        module = "in_accelerate" if attention == "accelerate" else "in_torch"
        found = harness.run_ranks(f"benchmarks.hugging_face.{module}", problem, gpus, options.tiny)
        facts = {"model": model, "attention": attention, "layers": problem.layers, "tokens a GPU": problem.tokens, "gpus": gpus}
        yield facts | harness.of_steps(found, problem.tokens, found[0]["flops"])


if __name__ == "__main__":  # tiny: narrow, float32 and on CPUs, to see that it runs
    options = harness.options(__doc__, rows=ROWS, steps=3, tiny=False, out="hugging-face-h200")
    harness.record(__doc__, options.out, "steps", steps(options))
