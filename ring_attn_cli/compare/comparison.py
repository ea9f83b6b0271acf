"""The comparison itself: select the variants that can run, run each once, judge its results, and time all of them round-robin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import median

from .cases import Arrays, Case
from .diagnosis import Evidence, diagnose
from .measure import Quantity, measure
from .messages import Change, Outcome, Request, join
from .oracles import ORACLES, Truth
from .pool import Pool, VariantError
from .sweep import Sweep
from .variants import ALL, FRAMEWORKS, TITLES, Variant

Tell = Callable[[str], None]

NEEDS = {"torch": ("torch",), "jax": ("jax", "flax")}


@dataclass(frozen=True)
class VariantResult:
    """One variant's result on a ring. ``seconds``: of each timed run. ``part``: of the result compared, in words; "" for all."""

    case: Case
    variant: str
    framework: str
    ranks: int
    quantities: tuple[Quantity, ...]
    diagnosis: tuple[str, ...]
    seconds: tuple[float, ...]
    peak_bytes: int | None
    part: str = ""

    @property
    def passed(self) -> bool:
        return all(quantity.within for quantity in self.quantities)

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)

    @property
    def peak_of(self) -> str:
        """Return the span that ``peak_bytes`` covers: "process" (since its start) in JAX on GPUs, otherwise "run" (one run)."""
        return "process" if self.framework == "jax" and self.case.device != "cpu" else "run"

    @property
    def label(self) -> str:
        where = "one device" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.variant}, {TITLES[self.framework]}, {where}"


@dataclass(frozen=True)
class SkippedVariant:
    """A variant that does not run in a framework on rings of ``ranks``, with the reason."""

    variant: str
    framework: str
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Comparison:
    """The results of the request ``sweep``. ``kinds``: the kind of device of each framework, such as "cpu" or a GPU's name."""

    sweep: Sweep
    results: tuple[VariantResult, ...]
    left_out: tuple[SkippedVariant, ...]
    kinds: dict[str, str]

    @property
    def passed(self) -> bool:
        """Return True if there is at least one result and every error is within its bound."""
        return bool(self.results) and all(result.passed for result in self.results)


@dataclass(frozen=True)
class Contestant:
    """One result to compute: a variant in a framework on a ring. ``case``: the sweep's case with ``variant.changes`` applied."""

    variant: Variant
    framework: str
    ranks: int
    case: Case

    def request(self, kind: str, change: Change | None = None) -> Request:
        variant = self.variant
        return Request(kind, variant.build, self.case, self.ranks, variant.oracle, variant.user, change)


def compare(sweep: Sweep, tell: Tell = lambda words: None) -> Comparison:
    frameworks = find_installed(sweep)
    cells, left_out = choose_contestants(sweep, frameworks)
    needed = tuple(name for name in FRAMEWORKS if any(each.framework == name for cell in cells for each in cell))
    tell(f"starting {' and '.join(TITLES[name] for name in needed)}")
    results: list[VariantResult] = []
    with Pool(needed, sweep.rings, sweep.cases[0].device, sweep.patience) as pool:
        for cell in cells:
            found, refused = _run_cell(pool, sweep, cell, tell)
            results += found
            left_out += refused
        kinds = pool.kinds
    if not results:
        raise ValueError(_join_reasons(left_out))
    return Comparison(sweep, tuple(results), tuple(_merge_rings(left_out)), kinds)


def find_installed(sweep: Sweep) -> tuple[str, ...]:
    missing = {name: [each for each in NEEDS[name] if find_spec(each) is None] for name in sweep.frameworks}
    there = tuple(name for name in sweep.frameworks if not missing[name])
    if not there:
        words = "; ".join(f"{TITLES[name]} needs {' and '.join(absent)}" for name, absent in missing.items())
        raise ValueError(f'nothing can run: {words}: run pip install "ring-attn[demo]"')
    return there


def choose_contestants(sweep: Sweep, frameworks: tuple[str, ...]) -> tuple[list[list[Contestant]], list[SkippedVariant]]:
    """Return for each case the combinations (variant, framework, ranks) to run, and a list of those left out, with reasons."""
    cells, left_out = [], []
    for case in sweep.cases:
        cell = []
        for variant in sweep.variants:
            before = len(cell)
            reasons = []
            own = variant.case(case)
            for framework in frameworks:
                for ranks in sweep.rings:
                    reason = variant.refusal(own, framework, ranks)
                    if reason is None:
                        cell.append(Contestant(variant, framework, ranks, own))
                    elif variant.user is None or framework in variant.frameworks:
                        reasons.append(SkippedVariant(variant.name, framework, (ranks,), reason))
            if len(cell) == before and variant.name in sweep.named:
                raise ValueError(_join_reasons(reasons) if reasons else f"{variant.name} runs in none of {', '.join(frameworks)}")
            left_out += reasons
        cells.append(cell)
    if not any(cells):
        raise ValueError(_join_reasons(left_out))
    return cells, left_out


def _run_cell(pool: Pool, sweep: Sweep, cell: list[Contestant], tell: Tell) -> tuple[list[VariantResult], list[SkippedVariant]]:
    """Run, judge and time the contestants of one case. Return their results, and the variants skipped because they failed."""
    outcomes: dict[Contestant, list[Outcome]] = {}
    refused = []
    for each in cell:
        tell(f"{each.variant.name} in {TITLES[each.framework]}, {each.ranks} ranks, {each.case.length} tokens")
        try:
            outcomes[each] = pool.ask(each.framework, each.request("prepare"))
        except VariantError as error:
            if not (error.everywhere and ALL in sweep.named and each.variant.user is None):
                raise ValueError(f"{each.variant.name} {error}") from None
            refused.append(SkippedVariant(each.variant.name, each.framework, (each.ranks,), str(error)))
    whole = {each: join(ran, ORACLES[each.variant.oracle].sharded, each.case.plan(each.ranks)) for each, ran in outcomes.items()}
    tell("float64 truth")
    truths: dict[object, Truth] = {}
    rows = {each: _judge(each, ran[0].cotangents, whole, truths) for each, ran in outcomes.items()}
    ask = lambda each, kind: pool.ask(each.framework, each.request(kind))
    peaks = {each: ask(each, "memory") for each in outcomes}
    seconds: dict[Contestant, list[float]] = {each: [] for each in outcomes}
    for turn in range(sweep.repeats):
        tell(f"time, turn {turn + 1} of {sweep.repeats}")
        contestants = list(outcomes)
        for each in contestants[turn % len(contestants) :] + contestants[: turn % len(contestants)]:  # rotate who runs first
            seconds[each].append(max(ask(each, "time")))
    for each in outcomes:
        ask(each, "forget")
    total = {each: None if None in ran else sum(ran) for each, ran in peaks.items()}
    return [replace(row, seconds=tuple(seconds[each]), peak_bytes=total[each]) for each, row in rows.items()], refused


def _judge(
    one: Contestant, cotangents: frozenset[str], whole: dict[Contestant, Arrays], truths: dict[object, Truth]
) -> VariantResult:
    """Compare the arrays of a contestant with the truth, with those on one device, and with those of the other framework.
    ``whole``: global results and gradients. ``truths``: a cache, to which a new truth is added. The VariantResult lacks
    ``seconds`` and ``peak_bytes``."""
    oracle = ORACLES[one.variant.oracle]
    inputs = oracle.inputs(one.case)
    key = one.variant.oracle, one.case, cotangents
    if key not in truths:
        truths[key] = oracle.truth(one.case, inputs, cotangents)
    truth, got = truths[key], whole[one]
    alone = whole.get(replace(one, ranks=1)) if one.ranks > 1 else None
    same = lambda other: other.variant.pair == one.variant.pair and other.ranks == one.ranks and other.framework != one.framework
    other = next((whole[each] for each in whole if same(each)), None)
    found = measure(got, truth.exact, truth.bounds, one.case.dtype, alone, other)
    missed = [quantity.name for quantity in found if not quantity.within]
    evidence = Evidence(one.case, one.case.plan(one.ranks), inputs, truth, got, missed, cotangents, alone)
    words = diagnose(evidence, one.variant.oracle == "attention")
    return VariantResult(one.case, one.variant.name, one.framework, one.ranks, tuple(found), tuple(words), (), None, truth.part)


def _merge_rings(left_out: list[SkippedVariant]) -> list[SkippedVariant]:
    rings: dict[tuple[str, str, str], set[int]] = {}
    for each in left_out:
        rings.setdefault((each.variant, each.framework, each.reason), set()).update(each.ranks)
    return [SkippedVariant(name, framework, tuple(sorted(ranks)), reason) for (name, framework, reason), ranks in rings.items()]


def _join_reasons(reasons: list[SkippedVariant]) -> str:
    return "; ".join(dict.fromkeys(f"{each.variant} in {TITLES[each.framework]}: {each.reason}" for each in reasons))
