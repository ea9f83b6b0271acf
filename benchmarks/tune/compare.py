"""The tile candidates of each kernel, compiled in parallel, checked against each other and timed in turns."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from typing import Any

from torch import Tensor

from ring_attn_core.kernels import steps
from ring_attn_core.kernels.call import RingCall
from ring_attn_core.kernels.launch import Launch
from ring_attn_core.kernels.obstacles import obstacle
from ring_attn_core.kernels.tile_sizes import TileConfig
from ring_attn_torch.attend.launch import launch

from ..support.report import cores
from ..support.turns import take_turns

BLOCKS = {
    "forward": [(128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4), (128, 64, 4)],
    "dq": [(128, 64, 8), (64, 64, 4), (128, 128, 8), (64, 128, 4)],
    "dkv": [(64, 64, 4), (32, 64, 4), (64, 128, 8), (32, 128, 8), (128, 64, 4), (32, 128, 4)],
}
"""Candidates for block_q, block_k and warps, each with every number of STAGES."""
WIDE_BLOCKS = {
    "forward": [(64, 32, 8), (64, 64, 8), (64, 32, 4), (32, 32, 4), (32, 64, 4), (128, 32, 8)],
    "dq": [(64, 32, 8), (64, 32, 4), (32, 32, 4), (32, 32, 8), (64, 16, 8)],
    "dkv": [(32, 64, 8), (32, 64, 16), (16, 64, 16), (16, 64, 8), (16, 32, 8), (32, 32, 16), (32, 16, 8), (16, 16, 8)],
}
"""Candidates for block_q, block_k and warps if the head dim is above 256."""
STAGES = 2, 3
WIDE_STAGES = 1, 2
SAME = 1e-2
"""Largest relative difference at which two bfloat16 results count as equal."""


def candidates(kernel: str, dim: int) -> list[TileConfig]:
    """Return the tiles of a kernel to try for heads of ``dim``."""
    if dim > 256:
        made = [TileConfig(*blocks, stages) for blocks in WIDE_BLOCKS[kernel] for stages in WIDE_STAGES]
        return [replace(tiles, tma=tma) for tiles in made for tma in (True, False)]
    return [TileConfig(*blocks, stages, tma=True) for blocks in BLOCKS[kernel] for stages in STAGES]


def built(kernel: str, call: RingCall, tiles: TileConfig) -> Launch:
    return getattr(steps, kernel)(replace(call, tiles_override=tiles), True, True)


def _obstacle(at: int, of: Launch) -> str | None:
    return obstacle([of], at)


def compare(kernel: str, call: RingCall, inputs: Mapping[str, Tensor], rounds: int) -> list[dict[str, Any]]:
    """Return one row per candidate, the fastest first: its tiles and ms, or why it was left out."""
    launches = {tiles: built(kernel, call, tiles) for tiles in candidates(kernel, call.head_dim)}
    with ProcessPoolExecutor(cores(), mp_context=multiprocessing.get_context("spawn")) as pool:
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
