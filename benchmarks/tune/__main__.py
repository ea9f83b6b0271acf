"""Which tiles are the fastest?

    python -m benchmarks.tune [--kernels forward] [--dims 128] [--features plain]

The measurements behind the numbers of ring_attn_core/kernels/tile_sizes.py. One launch of a kernel in bfloat16, causal, 16,384
tokens, 16 heads of 128 or 32 of 64, plain and with each feature that may need other tiles. Candidates compile in parallel in
processes of their own. A candidate that does not compile or fit, or gives another result than the first, is listed and not timed.
The others take turns (support/turns.py).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console

from ring_attn_core import causal

from ..support import report
from ..support.calls import HEADS, arrays, the_call
from .compare import BLOCKS, compare

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 30.0},
    "key_mask": {"given": frozenset({"key_mask"})},
    "dropout": {"given": frozenset({"dropout_seed"}), "dropout_rate": 0.1},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog=report.program(), description=report.first_line(__doc__))
    parser.add_argument("--kernels", nargs="+", default=list(BLOCKS), choices=BLOCKS)
    parser.add_argument("--dims", nargs="+", type=int, default=list(HEADS), choices=HEADS)
    parser.add_argument("--features", nargs="+", default=list(FEATURES), choices=FEATURES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="tune", help="name of the result file")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    result: dict[str, Any] = {"question": report.first_line(__doc__), **report.environment()}
    result["hardware"] = {"gpu": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
    result["fields"] = "tiles: block_q, block_k, warps, stages, tma"
    result["rows"] = []
    console = Console(width=150)
    for dim in options.dims:
        for feature in options.features:
            call = the_call(dim, device, **FEATURES[feature])
            inputs = arrays(call, device, causal())
            for kernel in options.kernels:
                rows = compare(kernel, call, inputs, options.rounds)
                result["rows"].append({"kernel": kernel, "dim": dim, "feature": feature, "candidates": rows})
                best = ", ".join("x".join(map(str, row["tiles"][:4])) + f" {row['ms']}" for row in rows[:3] if "ms" in row)
                console.print(f"{kernel:8} dim {dim:3} {feature:9} {best}")
                path = report.save(options.out, result)
    console.print(f"written: {path}")


if __name__ == "__main__":
    main()
