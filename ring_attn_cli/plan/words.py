"""The description of a RingPlan in words: title, mask, transfers, and the positions of a rank."""

from __future__ import annotations

from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.runs import Band


def title(plan: RingPlan) -> str:
    counts = f"{count_in_words(plan.ranks, 'rank')}, {count_in_words(plan.length, 'token')}"
    return f"{plan.layout} layout, {mask_in_words(plan.mask)}, {counts}"


def mask_in_words(band: Band) -> str:
    """Describe a mask, such as ``causal mask with offset 3``, by words or else by the inequality of its band."""
    if band == Band():
        return "full attention"
    if band.lo is not None and band.hi is None:
        return "causal mask" + (f" with offset {-band.lo:,}" if band.lo else "")
    if band.lo is not None and band.hi is not None and band.lo <= 0 <= band.hi:
        return f"window of {band.hi:,} before and {-band.lo:,} after"
    return f"mask {band}"


def travel_in_words(plan: RingPlan) -> str:
    """Describe transfers, with distances in ranks, as ``8 steps at shifts 0 to 7, 7 hops by 1, gradients go home by 1``."""
    shifts, hops = plan.shifts, plan.hops
    if not hops:
        return "1 step, nothing travels"
    at = f"0 to {shifts[-1]}" if len(shifts) > 2 and len(shifts) == shifts[-1] + 1 else _listed(shifts)
    by = f"{count_in_words(len(hops), 'hop')} by {hops[0]}" if len(set(hops)) == 1 else f"hops by {_listed(hops)}"
    return f"{count_in_words(len(shifts), 'step')} at shifts {at}, {by}, gradients go home by {plan.home}"


def holds(runs: tuple[tuple[int, int, int, int], ...]) -> str:
    """Return a rank's runs (base, length, start, stride) as slices of positions, such as ``0:512, 7680:8192``, or "padding"."""
    kept = [(start, start + stride * (length - 1) + 1, stride) for _, length, start, stride in runs if length]
    slices = [f"{first}:{end}" if stride == 1 else f"{first}:{end}:{stride}" for first, end, stride in kept]
    return ", ".join(slices) or "padding"


def short(pairs: int) -> str:
    """Format a count in at most five characters: ``9999``, ``525k``, ``1.05M``."""
    if pairs < 10_000:
        return str(pairs)
    mantissa, exponent = f"{pairs:.2e}".split("e")
    thousands, rest = divmod(int(exponent), 3)
    if thousands > len("kMGTPE"):
        return f"{pairs:.0e}".replace("+", "")
    return f"{float(mantissa) * 10**rest:.{2 - rest}f}{'kMGTPE'[thousands - 1]}"


def count_in_words(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _listed(numbers: tuple[int, ...]) -> str:
    """Format numbers as ``1 and 2`` or ``1 2 3``; more than eight are shortened: ``1 2 3 4 5 6 ... 63``."""
    if len(numbers) == 2:
        return f"{numbers[0]} and {numbers[1]}"
    head = numbers if len(numbers) <= 8 else (*numbers[:6], "...", numbers[-1])
    return " ".join(map(str, head))
