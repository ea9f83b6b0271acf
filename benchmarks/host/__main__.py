"""How long does a call keep the host busy, beside torch's own attention and JAX's call, and what does a step of a ring add?

    python -m benchmarks.host [--part calls thread chain ring first]

``calls``: a ring of one, 8 heads of 64, bfloat16, causal; host microseconds of a call while the GPU works asynchronously: forward
without gradients, and forward with backward. SDPA is ``torch.nn.functional.scaled_dot_product_attention`` on the same tokens.
``thread``: the backward in the caller's thread, by ``torch.autograd.set_multithreading_enabled(False)``.
``chain``: one of eight calls in a row, which torch.compile turns into one graph.
``ring``: the same on all GPUs of this host; the time that a step adds, and the bare batched send and receive of the same keys.
``first``: seconds from the first call of a fresh process to its first output, after imports and the creation of the CUDA context,
with Triton's cache empty and then full.

Prediction (PyTorch eager, forward / forward + backward, microseconds):
  Checks and look-ups of a call take 12; an autograd.Function 6 / 40 (its thread for the GPU is woken once, like SDPA's); a launch
  packs 500 to 1,000 bytes and calls the driver, 5, and allocates its outputs, 2 each: forward 2 launches (one zeroes its
  tickets), backward 4. So 35 / 120; SDPA takes 25 / 215.

Measured (results/host-h200-x2.json; 2 H200, 128 tokens; before: measured when each launch went through Triton):
                             forward   forward + backward
    eager                         52                  654   before 230, 1,637
    eager, caller's thread                            399
    under torch.compile          161                1,253
    eager, one of 8 in a row      66                  357
    compiled, one of 8           122                  444
    SDPA                          25                  234   in the caller's thread 164
    JAX                           59                   86
    a step of a ring of 2        203                  721   bare send and receive 74, 147

  The host's speed differs by 1.7 between machines and within a minute: only ratios in a row count. The forward takes 2.0 to 2.2
  times SDPA. It missed its prediction because that left out torch.empty (4 to 6 each with its keywords; empty_like of a prototype
  takes 2.4) and 100 small Python calls. The backward missed it by far, with 2.4 to 2.8 times SDPA. torch runs it in a thread of
  its own, 125 until it starts and 95 until the caller continues (SDPA has these too), and its work takes longer there, because
  each Python object that it touches is in the cache of another core; in the caller's thread a call takes 120 less. Under
  torch.compile a call has 150 of guards and wrappers, which a graph of 8 shares; 50 per pass remain for each op of torch.library.
  A step of a ring is a launch, 4 arrays and the lists of torch.distributed for the transfers.
  results/host-h100.json has the first calls: forward 6.4 to 8.7 s with an empty cache and 0.8 with a full one, imports of Triton
  included. The first gradient with an explicit cotangent costs a process 2.6 s, because torch imports sympy. Compiling the
  backward in a thread beside the forward delayed the forward from 6.5 to 10.8 s, because Triton holds Python's lock.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..support import report
from .calls import calls, chain, thread
from .first import first
from .ring import ring

PARTS = {"calls": calls, "thread": thread, "chain": chain, "ring": ring, "first": first}


def show(title: str, cells: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in cells[0]:
        table.add_column(column, justify="left" if isinstance(cells[0][column], str) else "right")
    for cell in cells:
        table.add_row(*(value if isinstance(value, str) else f"{value:,.1f}" for value in cell.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog=report.program(), description=report.first_line(__doc__))
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", default="host-h100", help="name of the result file")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"question": report.first_line(__doc__), **report.environment()}
    result["hardware"] = {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(), **result["hardware"]}
    for part in arguments.part:
        result[part] = PARTS[part]()
        Console(width=120).print(show(part, result[part]))
    print(report.save(arguments.out, result))


if __name__ == "__main__":
    main()
