"""Names of a ring's steps for profilers, such as "ring step 2 of 4, 32 MiB from rank 3"."""

from __future__ import annotations

from .direct import DirectPlan
from .needed import NeededPlan
from .ring import RingPlan
from .two_level import TwoLevelPlan

UNITS = "bytes", "KiB", "MiB", "GiB"


def step_name(plan: RingPlan, number: int, shift: int, size: int, rank: int | None = None) -> str:
    """Return the name of a step, such as "ring step 2 of 4, 32 MiB from rank 3". ``number`` counts from 1, and ``size`` whole
    shards. ``rank``: None if traced; the name then has the distance, for a TwoLevelPlan ``outer * host_ranks + inner``."""
    steps = place_name(plan, number)
    if isinstance(plan, NeededPlan) and plan.exchanges:
        return f"{steps}, {in_units(size)} of own and received keys"
    if shift == 0:
        return f"{steps}, own keys" if plan.k_shards == 1 else f"{steps}, {in_units(size)} of {plan.k_shards} ranks"
    owner = None if rank is None else (rank - shift) % plan.ranks
    if isinstance(plan, DirectPlan):
        tokens = sum(each.longest if owner is None else each.lengths[owner] for each in plan.slices(shift))
        size = size * tokens // plan.kv_local
    if owner is None and isinstance(plan, TwoLevelPlan):
        hosts, places = divmod(shift, plan.host_ranks)
        return f"{steps}, {in_units(size)} from {hosts} host{'s' * (hosts != 1)} and {places} place{'s' * (places != 1)} before"
    if owner is None:
        return f"{steps}, {in_units(size)} from {shift} rank{'s' * (shift > 1)} before"
    first = owner - owner % plan.k_shards
    owners = f"rank {owner}" if plan.k_shards == 1 else f"ranks {first} to {first + plan.k_shards - 1}"
    return f"{steps}, {in_units(size)} from {owners}"


def pass_name(name: str, direction: str) -> str:
    """Return ``name`` for the forward pass (``direction`` = "forward"), and ``name`` + " backward" for the backward pass."""
    return name if direction == "forward" else f"{name} {direction}"


def place_name(plan: RingPlan, number: int) -> str:
    """Return "ring step 2 of 4" for number 2 of 4. Return "before ring step 1 of 4" for 0, and "after ring step 4 of 4" for 5."""
    between_hosts = plan.inner_rings if isinstance(plan, TwoLevelPlan) else ()
    count = sum(len(ring.inner) for ring in between_hosts) or len(plan.shifts) * plan.groups
    where = "before " if number < 1 else "after " if number > count else ""
    return f"{where}ring step {min(max(number, 1), count)} of {count}"


def in_units(size: int) -> str:
    """Format bytes in the largest unit that gives at least 1; a symbolic number of ``jax.export`` stays in bytes."""
    if not isinstance(size, int):
        return f"{size} bytes"
    power = min(max(size.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return f"{size / (1 << 10 * power):.4g} {UNITS[power]}"
