"""The host time of plan_batches, and of one of its layouts, on the long tail of a fine-tuning set."""

from __future__ import annotations

import time
from typing import Any

from parity_tests.support.document_lengths import long_tail
from ring_attn_core import plan_batches

RANKS, TOKENS, TOKEN_COST = 64, 8192, 30_000.0
"""``TOKEN_COST``: about that of Llama-3-8B, in pairs."""


def batches() -> list[dict[str, Any]]:
    rows = []
    for documents in (100, 1000, 10_000):
        lengths, times = long_tail(documents), []
        for _ in range(9):
            began = time.perf_counter()
            plan = plan_batches(lengths, RANKS, TOKENS, cost=TOKEN_COST)
            times.append(time.perf_counter() - began)
        began = time.perf_counter()
        layouts = [batch.layout for batch in plan[:8]]
        each = (time.perf_counter() - began) / len(layouts)
        found = {"ms of the plan": 1e3 * sorted(times)[4], "fastest of 9": 1e3 * min(times), "ms of a layout": 1e3 * each}
        even = {"most / mean of microbatches": plan.balance, "of ranks": max(batch.balance for batch in plan[:8])}
        rows.append({"documents": documents, "microbatches": len(plan), **found, **even})
    return rows
