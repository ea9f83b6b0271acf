"""Lookup of this machine's record of measured speeds, for ``strategy="auto"``. Programs of several processes use no record."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import jax

from ring_attn_core.plan.machine import Machine
from ring_attn_core.plan.measured import stored
from ring_attn_core.problem.problem import Problem

MEASURED = ("gpu",)
"""The device types whose records are read. CPUs use none, so that no test depends on a user's record."""


def on_hardware(problem: Problem) -> Problem:
    """Add this machine's record of speeds for strategy "auto", unless several processes might have different records."""
    if problem.ranks == 1 or problem.device not in MEASURED or problem.options.strategy != "auto" or jax.process_count() > 1:
        return problem
    machine = _stored(device_name())
    return problem if machine is None else replace(problem, machine=machine, host_ranks=problem.ranks)


def device_name() -> str:
    """Return the kind of the first device, such as "NVIDIA H100 80GB HBM3"."""
    return jax.devices()[0].device_kind


@lru_cache
def _stored(device: str) -> Machine | None:
    """Return this machine's record of measured speeds; cached, so that equal calls take the same strategy if the file changes."""
    return stored("jax", device)
