"""How long does a call keep the host busy, beside torch's own attention and JAX's call, and what does a step of a ring add?

    python -m benchmarks.host [--part calls thread chain ring first]

``calls``: a ring of one, 8 heads of 64, bfloat16, causal; host microseconds of a call while the GPU works behind: forward without
gradients, and forward with backward. SDPA is ``torch.nn.functional.scaled_dot_product_attention`` on the same tokens.
``thread``: the backward in the caller's thread, by ``torch.autograd.set_multithreading_enabled(False)``.
``chain``: a call of eight in a row, of which torch.compile makes one graph.
``ring``: the same on all GPUs of this host; what a step adds, and the bare batched send and receive of the same keys.
``first``: seconds from the first call of a fresh process to its first output, imports and context of CUDA before it, with
Triton's cache empty and then full.

Prediction (PyTorch eager, forward / forward + backward, microseconds):
  Checks and look-ups of a call 12; an autograd.Function 6 / 40 (its thread for the GPU is woken once, as SDPA's is); a launch
  packs 500 to 1,000 bytes and calls the driver, 5, and allocates its outputs, 2 each: forward 2 launches (one zeroes its
  tickets), backward 4. So 35 / 120, where SDPA takes 25 / 215.

Measured (results/host-h100.json; one H100, 128 tokens; before: what was measured when every launch went through Triton):
                         forward   forward + backward
    eager                     82                  738   before 230, 1,637
    under torch.compile      213                1,353
    SDPA                      28                  235
    JAX                       80                  107

  The forward missed its prediction by two: what was left out are torch.empty (4 to 6 with its keywords, each) and 60 small calls
  of Python at 0.3. The backward missed it by far: torch runs it in a thread of its own, 125 until it has begun and 95 until the
  caller goes on (SDPA has these too), and what takes 123 in the caller's thread takes 357 there, for every Python object that it
  touches lies in the cache of another core. So what counts is how many there are. Under torch.compile the op of torch.library
  costs another 130 a pass. The first gradient with a cotangent of its own costs a process 2.6 s: torch imports sympy.
  Compiling the backward in a thread beside the forward delayed the forward from 6.5 to 10.8 s: Triton holds Python's lock.
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
