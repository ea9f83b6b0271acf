"""How long does a call keep the host busy, beside torch's own attention and JAX's call, and what does a step of a ring add?

    python -m benchmarks.host [--part calls thread chain ring steps first train batches]

``calls``: a ring of one, 8 heads of 64, bfloat16, causal; host microseconds of a call while the GPU works asynchronously: forward
without gradients, and forward with backward. SDPA is ``torch.nn.functional.scaled_dot_product_attention`` on the same tokens.
``thread``: the backward in the caller's thread, by ``torch.autograd.set_multithreading_enabled(False)``.
``chain``: one of eight calls in a row, which torch.compile turns into one graph.
``ring``: the same on all GPUs of this host; the time that a step adds, and the bare batched send and receive of the same keys.
``steps``: our own Python in a step, on any machine: transfers send nothing, and the backend computes nothing.
``first``: seconds from the first call of a fresh process to its first output, after imports and the creation of the CUDA context,
with Triton's cache empty and then full.
``train``: seconds from ``ring-attn train`` to its first step, with an empty cache.
``batches``: milliseconds of ``plan_batches`` and of one layout, for 64 ranks x 8,192 tokens, on any machine.

Prediction and measurements: results/README.md.
"""

from __future__ import annotations

from rich.console import Console

from ..support import harness, report
from .batches import batches
from .calls import calls, chain, thread
from .first import first
from .ring import ring
from .steps import steps
from .train import train

PARTS = {
    "calls": calls,
    "thread": thread,
    "chain": chain,
    "ring": ring,
    "steps": steps,
    "first": first,
    "train": train,
    "batches": batches,
}

if __name__ == "__main__":
    options = harness.options(__doc__, part=[*PARTS], out="host-h100")
    result = harness.result_of(__doc__)
    for part in options.part:
        rows = PARTS[part]()
        result[part] = rows
        shown = [{name: x if isinstance(x, str) else f"{x:,.1f}" for name, x in row.items()} for row in rows]
        Console(width=120).print(harness.table(shown, part))
    print(report.save(options.out, result))
