"""The work of a process of benchmarks/parity: both rings on the same cases."""

from __future__ import annotations

import os
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

from parity_tests.support.cases import Case, check
from ring_attn_core.reference.oracle import Attention
from ring_attn_core.reference.tolerance import relative_error


def compare(cases: list[Case]) -> list[dict[str, Any]]:
    """Return a row for each case, with its errors or the failure."""
    from parity_tests.jax import ring as on_jax
    from parity_tests.support.spawn import Ranks
    from parity_tests.torch import ring as on_torch

    pool = Ranks(most=max(case.ranks for case in cases))
    try:
        run = lambda case: (on_torch.run(pool, case), on_jax.run(case))
        return [{"case": str(case), "dtype": case.dtype, **_errors(case, *run(case))} for case in cases]
    finally:
        pool.close()


def _errors(case: Case, torch: Attention, jax: Attention) -> dict[str, Any]:
    try:
        shares = {name: max(check(case, got).values()) for name, got in (("share_torch", torch), ("share_jax", jax))}
    except AssertionError as error:
        return {"failed": str(error)}
    pairs = [(theirs, ours) for theirs, ours in zip(jax, torch, strict=True) if ours is not None and theirs is not None]
    return {**shares, "apart": max(relative_error(theirs, ours) for theirs, ours in pairs)}
