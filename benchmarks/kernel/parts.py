"""The parts of benchmarks/kernel: their measurements and cases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from ring_attn_core import causal, full, sliding_window
from ring_attn_core.kernels import steps
from ring_attn_core.kernels.call import RingCall
from ring_attn_core.kernels.hopper import launches as hopper
from ring_attn_core.plan.ring import RingPlan
from ring_attn_torch.attend.launch import launch

from ..support.calls import arrays, the_call
from ..support.turns import device_seconds, seconds, take_turns
from .candidates import CANDIDATES, Case, forward_in_jax, forward_in_torch, ours_in_jax, ours_in_torch, truth

PASSES = "forward", "backward"
BACKENDS = "auto", "triton"
FRAMEWORKS = {"torch": ours_in_torch, "jax": ours_in_jax}
STATES = {"none": (True, True), "written": (True, False), "read": (False, True), "read and written": (False, False)}
"""The flags (first step, last step) of a launch, by its accesses to the float32 state."""
CASES = [
    Case(),
    Case(mask=full()),
    Case(heads=32, kv_heads=8),
    Case(heads=32, kv_heads=32, dim=64),
    Case(batch=4, tokens=4096),
]
LENGTHS = [Case(batch=max(16384 // n, 1), tokens=n) for n in (1024, 2048, 4096, 8192, 16384, 32768)]
HEADS = [
    Case(heads=16, kv_heads=8, dim=256),
    Case(heads=8, kv_heads=1, dim=256),
    Case(heads=8, kv_heads=4, dim=512),
    Case(dim=192, v_dim=128),
    Case(batch=4, tokens=4096, heads=32, kv_heads=8),
    Case(batch=8, tokens=2048, heads=32, kv_heads=8),
    Case(batch=16, tokens=1024, heads=32, kv_heads=8),
    Case(batch=4, tokens=4096, heads=64, kv_heads=8),
    Case(batch=4, tokens=4096, heads=32, kv_heads=8, dim=64),
]
LATENT = [
    Case(heads=16, kv_heads=8, dim=256),
    *(Case(heads=heads, kv_heads=1, dim=576, v_dim=512, values_in_keys=True) for heads in (16, 128)),
    Case(heads=16, kv_heads=1, dim=512, v_dim=512, values_in_keys=True),
    Case(heads=16, kv_heads=1, dim=192, v_dim=128, values_in_keys=True),
]
"""The portable forward at 256, and beside it values in keys: 576/512 is latent attention in absorbed form."""
DOCUMENTS = 256, 512, 1024, 2048, 4096
"""Lengths, in tokens, of the documents in a row of 16,384 tokens."""
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
"""Largest relative error in bfloat16 with which a candidate is timed."""


def check(name: str, case: Case) -> float:
    """Return the largest relative error of out and gradients at 1,024 tokens. Raise ValueError if it exceeds ``WORST``."""
    short = replace(case, batch=1, tokens=1024, features=())
    named = zip(("out", "dq", "dk", "dv"), CANDIDATES[name](short)[0](), truth(short), strict=True)
    errors = {part: ((x.double() - y).norm() / y.norm()).item() for part, x, y in named}
    if not max(errors.values()) <= WORST:
        raise ValueError(f"{name} is wrong on {short}: {errors}")
    return max(errors.values())


def measure(case: Case, names: Iterable[str], rounds: int) -> list[dict[str, Any]]:
    """Return one cell per candidate, with milliseconds and TFLOP/s of both passes."""
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
            tflops = case.flops[index] / second / 1e12
            cells[name][passes] = {"ms": round(second * 1e3, 4), "tflops": round(tflops, 1)}
    return list(cells.values())


def device(rounds: int) -> list[dict[str, Any]]:
    """Return the GPU time of a call in JAX over that in PyTorch: the sum of all kernels, without the gaps between them."""
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
    """Return the cost of each feature: a backend's time with it over its time without, measured in turns."""
    cells = []
    for backend, case in product(BACKENDS, FEATURES):
        works = {str(each): ours_in_torch(each, backend) for each in (Case(), case)}
        cell: dict[str, Any] = {"case": str(case), "feature": case.features[0][0], "backend": backend}
        for index, passes in enumerate(PASSES):
            times = take_turns({name: work[1 + index] for name, work in works.items()}, rounds)
            cell[passes] = round(times[str(case)] / times[str(Case())], 3)
        cells.append(cell)
    return cells


def documents(rounds: int) -> list[dict[str, Any]]:
    """Return the rates of documents by extents, of the same tokens as a batch, and of that batch by cuDNN, measured in turns."""
    cells = []
    for length in DOCUMENTS:
        row = Case(heads=64, kv_heads=8, features=(("documents", length),))
        batch = replace(row, batch=row.tokens // length, tokens=length, features=())
        works = {"extents": ours_in_torch(row), "batch": ours_in_torch(batch), "cuDNN": CANDIDATES["cuDNN"](batch)}
        cell: dict[str, Any] = {"case": str(row)}
        for index, passes in enumerate(PASSES):
            times = take_turns({name: work[1 + index] for name, work in works.items()}, rounds)
            cell[passes] = {name: round(row.flops[index] / second / 1e12, 1) for name, second in times.items()}
        cells.append(cell)
    return cells


def latent(rounds: int) -> list[dict[str, Any]]:
    """Return the rates of the portable forward with values in keys, and with heads of 256 beside it, measured in turns."""
    cells = []
    for mask in (causal(), full()):
        cases = [replace(case, mask=mask) for case in LATENT]
        makers = {"torch": forward_in_torch, "jax": forward_in_jax}
        works = {f"{case}, {name}": make(case, "triton") for name, make in makers.items() for case in cases}
        times = take_turns(works, rounds)
        for case in cases:
            second = {name: times[f"{case}, {name}"] for name in makers}
            rates = {name: round(case.flops[0] / time / 1e12, 1) for name, time in second.items()}
            milliseconds = {name: round(time * 1e3, 4) for name, time in second.items()}
            cell = {"case": str(case), "backend": "triton", "forward": {"ms": milliseconds, "tflops": rates}}
            cells.append(cell | ({"error_at_1024": _latent_error(case)} if case.values_in_keys else {}))
    return cells


def _latent_error(case: Case) -> float:
    """Return the relative error of out at 1,024 tokens. Raise ValueError if it exceeds ``WORST``."""
    short = replace(case, batch=1, tokens=1024)
    out, exact = forward_in_torch(short, "triton")(), truth(short)[0]
    error = ((out.double() - exact).norm() / exact.norm()).item()
    if not error <= WORST:
        raise ValueError(f"the forward is wrong on {short}: {error}")
    return error


def state(rounds: int) -> list[dict[str, Any]]:
    """Return the time of a launch of 8,192 tokens that reads or writes the float32 (out, lse), over one that does neither."""
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
    """Return the rate of a step in a zigzag ring, with half of 8,192 x 8,192 pairs visible, over one with all visible."""
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


def _forward(call: RingCall, inputs: dict[str, torch.Tensor]) -> Any:
    return launch(steps.forward(call, False, False), inputs)


def _backward(call: RingCall, inputs: dict[str, torch.Tensor]) -> Any:
    if steps.in_one_pass(call):
        return launch(hopper.backward(call, False), inputs)
    return launch(steps.dq(call, False, False), inputs), launch(steps.dkv(call, False, False), inputs)


def million(rounds: int) -> dict[str, Any]:
    """Return the rate at 1,048,576 tokens over that at 131,072, and the peak memory in GiB."""
    works = {case.tokens: ours_in_torch(case) for case in MILLION}
    result: dict[str, Any] = {"case": str(MILLION[1])}
    for index, passes in enumerate(PASSES):
        times = {tokens: min(seconds(work[1 + index], 1) for _ in range(2)) for tokens, work in works.items()}
        rates = {case.tokens: case.flops[index] / times[case.tokens] / 1e12 for case in MILLION}
        result[passes] = {"tflops": round(rates[MILLION[1].tokens], 1), "of_131072": round(rates[2**20] / rates[2**17], 3)}
    return result | {"gibibytes": round(torch.cuda.max_memory_allocated() / 2**30, 1)}


def window(rounds: int) -> list[dict[str, Any]]:
    """Return the time of a window over that of full causal attention, divided by the ratio of their 128 x 128 tiles."""
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


MEASURED = {"cases": CASES, "lengths": LENGTHS, "heads": HEADS}
"""Parts that time each candidate on these cases."""
OTHERS = {
    "device": device,
    "documents": documents,
    "latent": latent,
    "features": features,
    "state": state,
    "window": window,
    "hop": hop,
    "million": million,
}
"""Parts with measurements of their own."""
