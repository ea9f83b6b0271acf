"""Which tiles are the fastest?

    python -m benchmarks.tune [--kernels forward] [--dims 128] [--features plain]

The measurements behind the numbers of ring_attn_core/kernels/tile_sizes.py. One launch of a kernel in bfloat16, causal, 16,384
tokens, 16 heads of 128, 32 of 64, 8 of 256 or 4 of 512, plain and with each feature that may need other tiles. Candidates compile
in parallel in processes of their own. A candidate that does not compile or fit, or gives another result than the first, is listed
and not timed. The others take turns (support/turns.py).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from ring_attn_core import causal

from ..support import harness
from ..support.calls import HEADS, arrays, the_call
from .compare import BLOCKS, compare

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 30.0},
    "key_mask": {"array_names": frozenset({"key_mask"})},
    "dropout": {"array_names": frozenset({"dropout_seed"}), "dropout_rate": 0.1},
}


def rows(options: Namespace) -> Iterator[dict[str, Any]]:
    device = torch.device("cuda", torch.cuda.current_device())
    for dim, feature in product(options.dims, options.features):
        call = the_call(dim, device, **FEATURES[feature])
        inputs = arrays(call, device, causal())
        for kernel in options.kernels:
            found = compare(kernel, call, inputs, options.rounds)
            best = ", ".join("x".join(map(str, row["tiles"][:4])) + f" {row['ms']}" for row in found[:3] if "ms" in row)
            yield {"kernel": kernel, "dim": dim, "feature": feature, "best": best, "candidates": found}


if __name__ == "__main__":
    options = harness.options(__doc__, kernels=[*BLOCKS], dims=[*HEADS], features=[*FEATURES], rounds=5, out="tune")
    fields = "tiles: block_q, block_k, warps, stages, tma"
    harness.record(__doc__, options.out, "rows", rows(options), fields=fields)
