"""How long does a step of decoding take, against reading the cache once, and against what the field runs?

    python -m benchmarks.decode --part gpu          one GPU: the time of a step, by candidate, and its ratio to that of the copy
    python -m benchmarks.decode --part tiles        one GPU: other tiles and splits than the chosen ones
    python -m benchmarks.decode --part host         one GPU: the host time of a step
    python -m benchmarks.decode --part cpu          one thread of a CPU, beside torch's own attention

A step must read keys, values and positions once. "The copy" is the time to move these bytes at the rate of ``y.copy_(x)`` over 2
GiB, read and written, in the same run. All candidates take turns (support/turns.py). First, each candidate's result is compared
with ours. A candidate that differs by more than 2 %, or that is not installed, is left out.

Prediction and measurements: results/README.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

from ring_attn_core.kernels import decode_call as of_core
from ring_attn_core.kernels.decode_backend import runnable_decode
from ring_attn_core.kernels.portable import launches
from ring_attn_core.kernels.tile_sizes import TileConfig
from ring_attn_torch.inference import tree_attention as inference

from ..support import harness, report
from .candidates import ON_CPU, ON_GPU, Case, Work, ours, ours_in_a_graph

CASES = [
    Case(),
    Case(fp8=True),
    Case(slots=2**17),
    Case(slots=2**14),
    Case(queries=8),
    Case(batch=16, slots=2**15),
    Case(batch=64, slots=2**13),
    Case(kv_heads=32, slots=2**17),
    Case(heads=64, kv_heads=8, slots=2**17),
    Case(dim=64, slots=2**19),
    Case(dim=256, heads=16, kv_heads=4, slots=2**18),
]
CPU_CASES = [
    Case(slots=16384, dtype="float32", device="cpu"),
    Case(slots=16384, dtype="bfloat16", device="cpu"),
    Case(slots=16384, heads=8, kv_heads=8, dim=64, dtype="float32", device="cpu"),
    Case(slots=1024, heads=8, kv_heads=8, dim=64, dtype="float32", device="cpu"),
    Case(slots=16384, queries=8, dtype="float32", device="cpu"),
]
WORST = 2e-2


def on_gpu(rounds: int) -> list[dict[str, Any]]:
    """Return the milliseconds of a step by candidate, and their ratio to reading at the copy bandwidth."""
    from ..support.turns import copy_bandwidth, take_turns

    bandwidth, cells = copy_bandwidth(), []
    for case in CASES:
        works, left_out = _works(case, ON_GPU)
        times = take_turns(works, rounds)
        ideal = case.bytes / bandwidth
        cell = {"case": str(case), "copy_TB_s": bandwidth / 1e12, "ideal_ms": ideal * 1e3, "left_out": left_out}
        cells.append(
            cell | {"ms": {name: x * 1e3 for name, x in times.items()}} | {"x": {n: t / ideal for n, t in times.items()}}
        )
        Console(width=180).print(cells[-1])
        del works
        torch.cuda.empty_cache()
    return cells


def tiles(rounds: int) -> list[dict[str, Any]]:
    """Measure a step with other tile sizes, stages and numbers of splits, in CUDA graphs."""
    from ..support.turns import copy_bandwidth, take_turns

    bandwidth, cells = copy_bandwidth(), []
    sizes = (32, 4), (64, 2), (64, 4), (128, 4), (128, 8)
    tried = [(slots, warps, stages) for slots, warps in sizes for stages in (2, 4, 6, 8)]
    for case in (Case(), Case(fp8=True), Case(queries=8), Case(queries=8, fp8=True)):
        for block in ((16 if case.queries == 1 else 32, *of_slots) for of_slots in tried):
            for residents in (1, 2, 3, 4):
                cells.append({"case": str(case), "tiles": block, "residents": residents})
                try:
                    with _tiles_of(TileConfig(*block), residents):
                        seconds = take_turns({"it": ours_in_a_graph(case)}, rounds)["it"]
                    cells[-1]["x"] = seconds / (case.bytes / bandwidth)
                except Exception as error:  # does not compile, or does not fit
                    cells[-1]["error"] = f"{type(error).__name__}: {error}"[:100]
                torch.cuda.empty_cache()
        best = sorted((cell for cell in cells if cell["case"] == str(case) and "x" in cell), key=lambda cell: cell["x"])
        Console(width=180).print(best[:12])
    return cells


def _tiles_of(config: TileConfig, residents: int) -> Any:
    """Return a context in which decoding uses these tiles and splits for ``residents`` programs per multiprocessor."""
    from contextlib import ExitStack

    stack = ExitStack()
    for cached in (inference._check, inference._problem, runnable_decode, launches.decode, launches.merge_pairs):
        cached.cache_clear()
        stack.callback(cached.cache_clear)
    stack.enter_context(patch.object(of_core, "decode_tiles", lambda *_: config))
    stack.enter_context(patch.object(of_core, "residents", lambda call: residents))
    return stack


def on_host(rounds: int) -> list[dict[str, Any]]:
    """Return the host microseconds of a call on a short cache, and those of a whole step, called and in a CUDA graph."""
    cells = []
    for case in (Case(slots=1024), Case(slots=16384)):
        work = ours(case)
        work()
        host = []
        for _ in range(max(rounds, 5)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(100):
                work()
            host.append((time.perf_counter() - began) / 100)
            torch.cuda.synchronize()
        from ..support.turns import take_turns

        ends = take_turns({"called": work, "graph": ours_in_a_graph(case)}, rounds)
        cells.append(
            {"case": str(case), "host_us": statistics.median(host) * 1e6, **{f"{n}_us": x * 1e6 for n, x in ends.items()}}
        )
        Console(width=180).print(cells[-1])
    return cells


def on_cpu(rounds: int) -> list[dict[str, Any]]:
    """Return the milliseconds of CPU time of each candidate, measured in turns: minimum and median of the rounds."""
    torch.set_num_threads(1)
    cells = []
    for case in CPU_CASES:
        works, left_out = _works(case, ON_CPU)
        measured: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(3 * rounds):
            for name, work in works.items():
                began = time.process_time()  # not the wall clock: other processes may use the machine too
                result = work()
                getattr(result, "block_until_ready", lambda: None)()
                measured[name].append(time.process_time() - began)
        ms = {name: {"least": min(x) * 1e3, "median": statistics.median(x) * 1e3} for name, x in measured.items()}
        over = {name: round(x["median"] / ms["SDPA"]["median"], 2) for name, x in ms.items()}
        cells.append({"case": str(case), "ms": ms, "over_SDPA": over, "left_out": left_out})
        Console(width=180).print(cells[-1])
    return cells


def _works(case: Case, candidates: dict[str, Callable[[Case], Work]]) -> tuple[dict[str, Work], dict[str, str]]:
    """Return the candidates that run and agree with the first, and the reasons why the others are left out."""
    works: dict[str, Work] = {}
    left_out: dict[str, str] = {}
    exact = None
    for name, make in candidates.items():
        try:
            work = make(case)
            result = work()
            got = _as_tensor(result, case)
            exact = got if exact is None else exact
            error = ((got - exact).norm() / exact.norm()).item()
            if case.queries > 1 and name in ("SDPA", "SDPA, slots first", "ring-attention-pytorch's formula"):
                error = 0.0  # not masked among the newest tokens: the work is the same
            if not error <= WORST:
                raise RuntimeError(f"differs by {error:.1e}")
            works[name] = work
        except Exception as error:  # not installed, or not for this case
            left_out[name] = f"{type(error).__name__}: {error}"[:150]
    return works, left_out


def _as_tensor(result: Any, case: Case) -> torch.Tensor:
    first = result[0] if isinstance(result, tuple) else result
    x = first if isinstance(first, torch.Tensor) else torch.from_dlpack(first)
    shape = (case.batch, case.queries, case.heads, case.dim)
    if x.ndim == 4 and tuple(x.shape) != shape:
        x = x.transpose(1, 2)
    return x.reshape(shape).float()


PARTS = {"gpu": on_gpu, "tiles": tiles, "host": on_host, "cpu": on_cpu}


if __name__ == "__main__":
    options = harness.options(__doc__, part=dict.fromkeys(PARTS, False) | {"gpu": True, "host": True}, rounds=7, out="decode")
    result = harness.result_of(__doc__)
    for part in options.part:
        result[part] = PARTS[part](options.rounds)
        print(report.save(options.out, result))
