"""How fast are the kernels on one GPU, in both frameworks, against what the field runs, and what does each feature cost?

bfloat16, random normal, through the public functions: PyTorch eager, JAX jitted. Every candidate is first checked against float64
at 1,024 tokens, out and gradients. The candidates of a case take turns in one process (benchmarks/turns.py); the median of the
rounds counts. TFLOP/s count the visible pairs only, a backward as 2.5 forwards. What each feature costs is measured for every
backend of ours, its time with the feature over its time without.

Prediction (H200, causal, 16 heads of 128, 16,384 tokens; forward 1.1 TFLOP, backward 2.75):
  The tensor cores give 790 TFLOP/s in short bursts, so 1.4 ms; k and v once a query tile, 1.1 GB from L2, overlap. A tile of
  128 x 128 is 2,048 cycles of products, 1,024 of exp2 (16 a cycle) and some 1,000 of issue; Triton's loop does not overlap the
  softmax of a warpgroup with its own products, and two warpgroups overlap by chance: between 2,048 and 4,100 cycles a tile, 500
  TFLOP/s at 3,600. The deterministic backward does 7 products for 5 counted, so it starts from 5/7 of such a rate, 360.

Measured:
  results/kernel-h200.json, Hopper's own kernels under "auto" (kernels/hopper/README.md has their roofline and what was tried) and
  the portable ones by name. Portable forward 3,550 cycles a tile, as predicted: the gap to FlashAttention-4 is softmax that is
  not overlapped. What moved it: a 2-D descriptor for q (a 4-D one puts q into registers, and the loop spills), ranges of key
  tiles by scalar arithmetic instead of reductions (+2 %), no cleaning of v in edge tiles without need (+3 %). Computing the next
  scores before this softmax, by hand, lost 10 %: Triton waits for both products at once. Dear are softcap (a tanh a score:
  by a polynomial where it is small, forward 41 -> 32 %), a random key mask (a padding mask is skipped by whole tiles), and
  dropout (a Philox counter is 21 instructions and serves 8 scores, 4 in the pass for dk and dv). Where the softmax hides, as on
  Hopper, each shows in full.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ring_attn_core import causal, full, sliding_window
from ring_attn_core.kernels import steps
from ring_attn_core.kernels.call import Call
from ring_attn_core.kernels.hopper import launches as hopper
from ring_attn_core.kernels.portable import launches as portable
from ring_attn_core.plan.ring import RingPlan
from ring_attn_torch.attend.launch import launch

from . import report
from .kernel_candidates import CANDIDATES, Case, ours_in_jax, ours_in_torch, truth
from .tune import arrays, the_call
from .turns import device_seconds, seconds, take_turns

PASSES = "forward", "backward"
BACKENDS = "auto", "triton"
FRAMEWORKS = {"torch": ours_in_torch, "jax": ours_in_jax}
STATES = {"none": (True, True), "written": (True, False), "read": (False, True), "read and written": (False, False)}
"""What a launch does with the float32 state, and whether it is a ring's first and last."""
CASES = [
    Case(),
    Case(mask=full()),
    Case(heads=32, kv_heads=8),
    Case(heads=32, kv_heads=32, dim=64),
    Case(batch=4, tokens=4096),
]
LENGTHS = [Case(batch=max(16384 // n, 1), tokens=n) for n in (1024, 2048, 4096, 8192, 16384, 32768)]
FEATURES = [
    Case(features=features)
    for features in (
        (("softcap", 30.0),),
        (("sinks", True),),
        (("alibi", True),),
        (("key_mask", 0.9),),
        (("padding", 0.9),),
        (("extents", True),),
        (("dropout", 0.1),),
        (("documents", 2048),),
    )
]
WINDOW = Case(tokens=131072, heads=8, kv_heads=8, mask=sliding_window(4095)), Case(tokens=131072, heads=8, kv_heads=8)
MILLION = Case(tokens=2**17, heads=4, kv_heads=4), Case(tokens=2**20, heads=4, kv_heads=4)
WORST = 6e-3
"""Relative error in bfloat16 above which nothing is timed."""


def check(name: str, case: Case) -> float:
    """The largest relative error of out and gradients at 1,024 tokens; ValueError above WORST."""
    short = Case(1, case.heads, case.kv_heads, 1024, case.dim, case.mask)
    named = zip(("out", "dq", "dk", "dv"), CANDIDATES[name](short)[0](), truth(short), strict=True)
    errors = {part: ((x.double() - y).norm() / y.norm()).item() for part, x, y in named}
    if not max(errors.values()) <= WORST:
        raise ValueError(f"{name} is wrong on {short}: {errors}")
    return max(errors.values())


def measure(case: Case, names: Iterable[str], rounds: int) -> list[dict[str, Any]]:
    """A cell a candidate: seconds and TFLOP/s of both passes."""
    cells, made = {}, {}
    for name in names:
        try:
            made[name] = CANDIDATES[name](case)
            error = None if case.features else check(name, case)
            cells[name] = {"candidate": name, "case": str(case), "tokens": case.tokens, "error_at_1024": error}
        except (RuntimeError, ValueError) as reason:
            cells[name] = {"candidate": name, "case": str(case), "left_out": str(reason).splitlines()[0][:200]}
            made.pop(name, None)
    for index, passes in enumerate(PASSES):
        times = take_turns({name: works[1 + index] for name, works in made.items()}, rounds)
        for name, second in times.items():
            tflops = case.flops * (1, 2.5)[index] / second / 1e12
            cells[name][passes] = {"ms": round(second * 1e3, 4), "tflops": round(tflops, 1)}
    return list(cells.values())


def device(rounds: int) -> list[dict[str, Any]]:
    """How long the GPU works on a call of JAX over how long on one of PyTorch: all its kernels, without the gaps between them."""
    cells = []
    for backend, case in product(BACKENDS, CASES):
        works = {name: ours(case, backend) for name, ours in FRAMEWORKS.items()}
        cell: dict[str, Any] = {"case": str(case), "backend": backend}
        for index, passes in enumerate(PASSES):
            times = take_turns({name: work[1 + index] for name, work in works.items()}, rounds, device_seconds)
            milliseconds = {name: round(time * 1e3, 4) for name, time in times.items()}
            cell[passes] = {"ms": milliseconds, "jax_over_torch": round(times["jax"] / times["torch"], 3)}
        cells.append(cell)
    return cells


def features(rounds: int) -> list[dict[str, Any]]:
    """What every feature costs: a backend's time with it over its time without, taking turns."""
    cells = []
    for backend, case in product(BACKENDS, FEATURES):
        works = {str(each): ours_in_torch(each, backend) for each in (Case(), case)}
        cell: dict[str, Any] = {"case": str(case), "feature": case.features[0][0], "backend": backend}
        for index, passes in enumerate(PASSES):
            times = take_turns({name: work[1 + index] for name, work in works.items()}, rounds)
            cell[passes] = round(times[str(case)] / times[str(Case())], 3)
        cells.append(cell)
    return cells


def state(rounds: int) -> list[dict[str, Any]]:
    """What it costs a launch of 8,192 tokens to read and write the float32 (out, lse) of a ring, over one that does neither."""
    cells = []
    device = torch.device("cuda", torch.cuda.current_device())
    for backend, band in product(BACKENDS, (causal(), full())):
        call = the_call(128, device, tokens=8192, hopper=backend != "triton")
        inputs = arrays(call, device, band)
        inputs["out_in"], inputs["lse_in"] = launch(steps.forward(call, True, False), inputs)
        works = {name: partial(launch, steps.forward(call, *place), inputs) for name, place in STATES.items()}
        times = take_turns(works, rounds)
        ratios = {name: round(times[name] / times["none"], 3) for name in STATES}
        cells.append({"backend": backend, "mask": str(band), "ms": round(times["none"] * 1e3, 4)} | ratios)
    return cells


def hop(rounds: int) -> list[dict[str, Any]]:
    """The rate of a hop inside a zigzag ring, which sees half of 8,192 x 8,192 tokens, over that of one that sees all of them."""
    cells = []
    device = torch.device("cuda", torch.cuda.current_device())
    for backend in BACKENDS:
        whole = the_call(128, device, tokens=8192, hopper=backend != "triton")
        half = replace(whole, q_runs=2, k_runs=2)
        inputs = arrays(whole, device, full())
        inputs["out_in"], inputs["lse_in"] = launch(steps.forward(whole, True, False), inputs)
        inputs |= {name: torch.zeros_like(inputs["k"], dtype=torch.float32) for name in ("dk_in", "dv_in", "dq_in")}
        if steps.in_one_pass(whole):
            inputs["dq_in"] = torch.zeros(hopper.sums_of_dq(whole), device=device)
        rows = torch.tensor(RingPlan("zigzag", causal(), 2, whole.seq_local).rows(0, 1), dtype=torch.int32, device=device)
        cell: dict[str, Any] = {"backend": backend}
        for name, one in (("forward", _forward), ("backward", _backward)):
            works = {"whole": partial(one, whole, inputs), "half": partial(one, half, inputs | {"rows": rows})}
            times = take_turns(works, rounds)
            cell[name] = round(times["whole"] / times["half"] / 2, 3)
        cells.append(cell)
    return cells


def _forward(call: Call, inputs: dict[str, torch.Tensor]) -> Any:
    return launch(steps.forward(call, False, False), inputs)


def _backward(call: Call, inputs: dict[str, torch.Tensor]) -> Any:
    if steps.in_one_pass(call):
        return launch(hopper.backward(call, False, False), inputs)
    return launch(portable.dq(call, False, False), inputs), launch(portable.dkv(call, False, False), inputs)


def million(rounds: int) -> dict[str, Any]:
    """The rate of 1,048,576 tokens over that of 131,072, and the memory that they take."""
    works = {case.tokens: ours_in_torch(case) for case in MILLION}
    result: dict[str, Any] = {"case": str(MILLION[1])}
    for index, passes in enumerate(PASSES):
        times = {tokens: min(seconds(work[1 + index], 1) for _ in range(2)) for tokens, work in works.items()}
        rates = {case.tokens: case.flops * (1, 2.5)[index] / times[case.tokens] / 1e12 for case in MILLION}
        result[passes] = {"tflops": round(rates[MILLION[1].tokens], 1), "of_131072": round(rates[2**20] / rates[2**17], 3)}
    return result | {"gibibytes": round(torch.cuda.max_memory_allocated() / 2**30, 1)}


def window(rounds: int) -> list[dict[str, Any]]:
    """A backend's time for a window over that of the whole causal square, over their shares of 128 x 128 tiles."""
    return [_window(backend, rounds) for backend in BACKENDS]


def _window(backend: str, rounds: int) -> dict[str, Any]:
    works = {str(case): ours_in_torch(case, backend) for case in WINDOW}
    tiles = lambda case: sum(_tiles_of_row(case, first) for first in range(0, case.tokens, 128))
    share = tiles(WINDOW[0]) / tiles(WINDOW[1])
    result: dict[str, Any] = {"case": str(WINDOW[0]), "backend": backend, "share_of_tiles": round(share, 4)}
    for index, passes in enumerate(PASSES):
        times = take_turns({name: work[1 + index] for name, work in works.items()}, max(rounds // 3, 1))
        result[passes] = round(times[str(WINDOW[0])] / times[str(WINDOW[1])] / share, 3)
    return result


def _tiles_of_row(case: Case, first: int, block: int = 128) -> int:
    least = 0 if case.mask.hi is None else max(first - case.mask.hi, 0)
    return (first + block - 1) // block - least // block + 1


MEASURED = {"cases": CASES, "lengths": LENGTHS}
OTHERS = {"device": device, "features": features, "state": state, "window": window, "hop": hop, "million": million}


def show(cells: list[dict[str, Any]]) -> Table:
    table = Table(title="TFLOP/s", title_justify="left")
    for column in ("case", "candidate", *PASSES):
        table.add_column(column, justify="left" if column in ("case", "candidate") else "right")
    for cell in cells:
        table.add_row(
            cell["case"],
            cell["candidate"],
            *(f"{cell[p]['tflops']:.0f}" if p in cell else cell.get("left_out", "") for p in PASSES),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=report.first_line(__doc__))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--part", nargs="*", choices=[*MEASURED, *OTHERS], default=[*MEASURED, *OTHERS])
    parser.add_argument("--out", default="kernel-h200", help="name of the result file")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"question": report.first_line(__doc__), **report.environment()}
    result["hardware"] = {"gpu": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
    for part in arguments.part:
        if part in MEASURED:
            result[part] = [cell for case in MEASURED[part] for cell in measure(case, CANDIDATES, arguments.rounds)]
            Console(width=150).print(show(result[part]))
        else:
            result[part] = OTHERS[part](arguments.rounds)
            Console(width=150).print(result[part])
        torch.cuda.empty_cache()
        path = report.save(arguments.out, result)
    print(path)


if __name__ == "__main__":
    main()
