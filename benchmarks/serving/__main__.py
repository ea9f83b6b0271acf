"""How soon does a long prompt's first token come, and how fast the next ones, at the shape of Llama 3 8B?

    python -m benchmarks.serving [--framework torch jax] [--layers 32] [--tokens 524288] [--chunk 65536]

``RingTransformer.generate`` on one prompt over all GPUs of this host; random weights in bfloat16, replicated on each GPU, and
random ids. The same run measures the rates of one GPU: attention's forward over two chunks, a product of the MLP, and a copy.

    of the kernels' rate   seconds of attention's and the weights' operations at those two rates, over those to the first token
    over reading           seconds of a step over those of reading the weights and a GPU's cache at the copy's rate

Prediction (one H200, 524,288 tokens):
  First token. Attention takes 7.2e16 operations at 640 TFLOP/s, 113 s; products of weights 7.3e15 at 700, 10.5 s; norms, rotary,
  SwiGLU and additions about 40 passes over 4.3 GB per layer at 4 TB/s, 1.4 s. Attention over cached keys uses extents, which cost
  the forward 13 %, and merges two results, 12 GB in float32 per layer: 15 s more. In all 140 s, 0.88 of the kernels' rate.
  Step. 15 GB of weights and 69 GB of cache at 4.28 TB/s, 19.6 ms; about 30 small kernels per layer of 2 us, 2 ms. 1.10 times.

Measured (one H200, torch 2.11, jax 0.11.2, Triton 3.6):
  PyTorch, 524,288 tokens (results/serving-h200.json): the first token after 131 s, 0.92 of the kernels' rate (653 TFLOP/s of
  attention, 676 of the product). The last chunk takes 29.6 s; these rates alone give 27.2. About 0.5 s is neither, as in the
  first chunk, and extents and the merge take 1.9 s, 7 % of attention instead of 13. A step takes 24.6 ms, 1.25 times reading: 150
  us per layer go to products of one row, which read weights at less than a copy's rate, and to the gaps between them.
  JAX, 131,072 tokens (results/serving-h200-jax.json): 10.0 s, 0.95 of the kernels' rate; a step 9.6 ms, 1.28 times reading.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..support import report
from ..support.process import run_fresh
from .problem import Problem, prefill_flops, step_bytes

FRAMEWORKS = {"torch": "benchmarks.serving.torch_rank", "jax": "benchmarks.serving.jax_rank"}


def measure(framework: str, problem: Problem, gpus: int, rates: dict[str, float] | None) -> dict[str, Any]:
    """Return the times of the slowest rank, and their ratios to the ideal at the rates of one GPU."""
    found = run_fresh(FRAMEWORKS[framework], {**problem._asdict(), "gpus": gpus}, gpus if framework == "torch" else 1)
    first, step = (max(rank[name] for rank in found) for name in ("first token", "step"))
    attention, products = prefill_flops(problem)
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
    return cell


def show(cells: list[dict[str, Any]]) -> Table:
    columns = [name for name in cells[0] if name != "chunks s"]
    table = Table(title="one prompt", title_justify="left")
    for column in columns:
        table.add_column(column)
    for cell in cells:
        table.add_row(*(str(cell[name]) for name in columns))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog=report.program(), description=report.first_line(__doc__))
    parser.add_argument("--framework", nargs="*", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=524288)
    parser.add_argument("--chunk", type=int, default=65536)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--tiny", action="store_true", help="narrow, float32 and on CPUs: to see that it runs")
    parser.add_argument("--out", default="serving-h200", help="name of the result file")
    options = vars(parser.parse_args())
    frameworks, out = options.pop("framework"), options.pop("out")
    problem = Problem(**options)
    gpus = 2 if problem.tiny else torch.cuda.device_count()
    result: dict[str, Any] = {"question": report.first_line(__doc__), **report.environment(), "problem": problem._asdict()}
    if not problem.tiny:
        result["hardware"] = {"gpu": torch.cuda.get_device_name(), "gpus": gpus, **result["hardware"]}
        result["rates"] = run_fresh("benchmarks.serving.rates", problem._asdict())[0]
        print({name: f"{rate / 1e12:.1f}e12" for name, rate in result["rates"].items()})
    result["prompts"] = []
    for framework in frameworks:
        result["prompts"].append(measure(framework, problem, gpus, result.get("rates")))
        Console(width=160).print(show(result["prompts"]))
        print(report.save(out, result))  # after each, so that a later failure loses nothing


if __name__ == "__main__":
    main()
