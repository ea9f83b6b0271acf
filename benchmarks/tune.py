"""Which tiles are the fastest? The measurements behind the numbers of ring_attn_core/kernels/tile_sizes.py.

One launch of a kernel in bfloat16, causal, 16,384 tokens, 16 heads of 128 or 32 of 64, plain and with each feature that may want
other tiles. Candidates compile side by side in processes of their own; one that does not compile or fit, or whose result is
another than the first one's, is named and not timed. The others take turns (benchmarks/turns.py).
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ring_attn_core import Band, causal
from ring_attn_core.kernels import steps
from ring_attn_core.kernels.call import Call
from ring_attn_core.kernels.compile import obstacle
from ring_attn_core.kernels.launch import Launch
from ring_attn_core.kernels.portable import launches as portable
from ring_attn_core.kernels.tile_sizes import TileConfig
from ring_attn_core.plan.ring import RingPlan
from ring_attn_torch.attend.launch import capability, launch

from . import report
from .turns import take_turns

TOKENS = 16384
HEADS = {128: 16, 64: 32}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 30.0},
    "key_mask": {"given": frozenset({"key_mask"})},
    "dropout": {"given": frozenset({"dropout_seed"}), "dropout_rate": 0.1},
}
BLOCKS = {
    "forward": [(128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4), (128, 64, 4)],
    "dq": [(128, 64, 8), (64, 64, 4), (128, 128, 8), (64, 128, 4)],
    "dkv": [(64, 64, 4), (32, 64, 4), (64, 128, 8), (32, 128, 8), (128, 64, 4), (32, 128, 4)],
}
"""block_q, block_k and warps to try, each with every number of STAGES."""
STAGES = 2, 3
SAME = 1e-2
"""Relative difference of two results in bfloat16 below which they are the same."""


def candidates(kernel: str) -> list[TileConfig]:
    return [TileConfig(*blocks, stages, tma=True) for blocks in BLOCKS[kernel] for stages in STAGES]


def the_call(dim: int, device: torch.device, tokens: int = TOKENS, **features: Any) -> Call:
    """A ring of one with heads of ``dim``; ``features``: fields of the Call."""
    shape = {"batch": 1, "seq_local": tokens, "kv_local": tokens, "heads": HEADS[dim], "kv_heads": HEADS[dim]}
    of_ring = {"q_runs": 1, "k_runs": 1, "packed": False, "aligned": True, "clean": False, "tf32": False}
    plain = {"softcap": None, "dropout_rate": 0.0, "given": frozenset()} | features
    dims = {"head_dim": dim, "v_dim": dim, "dtype": "bfloat16", "scale": dim**-0.5}
    return Call(**shape, **of_ring, **plain, **dims, capability=capability(device))


def arrays(call: Call, device: torch.device, band: Band, hidden: float = 0.1) -> dict[str, Tensor]:
    """Random inputs by name under a mask; ``hidden``: the share of keys that a key mask hides."""
    tokens = call.seq_local
    generator = torch.Generator(device).manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, device=device, generator=generator)
    made = {name: normal(1, tokens, call.heads, call.head_dim).bfloat16() for name in ("q", "k", "v", "dout")}
    made["lse2"] = torch.full((1, call.heads, tokens), 14.0, device=device)
    made["delta"] = normal(1, call.heads, tokens)
    made["rows"] = torch.tensor(RingPlan("contiguous", band, 1, tokens).rows(0, 0), dtype=torch.int32, device=device)
    draw = torch.tensor([7, 0, 0, 0], dtype=torch.int32, device=device).view(torch.uint32)
    (made["dropout"],) = launch(portable.dropout_streams(1, call.heads), {"dropout_seed": draw})
    seen = torch.rand(tokens // 8, 8, device=device, generator=generator) >= hidden
    bits = (seen.int() << torch.arange(8, device=device)).sum(-1).to(torch.uint8)
    made["key_mask"], made["key_mask_spans"] = launch(portable.unpack_key_mask(1, tokens), {"key_mask_bits": bits[None]})
    return made


def built(kernel: str, call: Call, tiles: TileConfig) -> Launch:
    return getattr(steps, kernel)(replace(call, tiles_asked=tiles), True, True)


def _obstacle(at: int, of: Launch) -> str | None:
    return obstacle([of], at)


def compare(kernel: str, call: Call, inputs: Mapping[str, Tensor], rounds: int) -> list[dict[str, Any]]:
    """A row a candidate, the fastest first: its tiles and ms, or why it was left out."""
    launches = {tiles: built(kernel, call, tiles) for tiles in candidates(kernel)}
    with ProcessPoolExecutor(report.cores(), mp_context=multiprocessing.get_context("spawn")) as pool:
        obstacles = dict(zip(launches, pool.map(partial(_obstacle, call.capability), launches.values()), strict=True))
    rows, works, truth = [], {}, None
    for tiles, reason in obstacles.items():
        if reason is None:
            result = launch(launches[tiles], inputs)[0].float()
            truth = result if truth is None else truth
            error = ((result - truth).norm() / truth.norm()).item()
            reason = None if error <= SAME else f"its result is another: {error:.1e}"
        if reason is None:
            works[tiles] = partial(launch, launches[tiles], inputs)
        else:
            rows.append({"tiles": astuple(tiles), "left_out": reason})
    times = take_turns({str(astuple(tiles)): work for tiles, work in works.items()}, rounds)
    timed = [{"tiles": astuple(tiles), "ms": round(times[str(astuple(tiles))] * 1e3, 3)} for tiles in works]
    return sorted(timed, key=lambda row: row["ms"]) + rows


def main() -> None:
    parser = argparse.ArgumentParser(description=report.first_line(__doc__))
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
