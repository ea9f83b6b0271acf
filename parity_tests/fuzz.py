"""Random problems from the whole space of cases, against float64; a failing one is shrunk to the smallest that still fails.

    python -m parity_tests.fuzz [jax|torch] [--problems 2000] [--seed 0] [--trees] [--balanced] [--recurrences]
                                   [--hybrids] [--strategy ring gather ...] [--order]

The same seed gives the same problems, those of the tests where the number is theirs too. With --trees each has a prefix
tree. With --balanced each has a balanced layout, most under the strategies "auto" and "direct". With --strategy each named
strategy gets as many problems; "push" runs in PyTorch, over files in place of GPU memory. With --order each has
order="global", and must have the bits of one rank.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from ring_attn_core import LAYOUTS, Gather, causal, full, sliding_window
from ring_attn_core.reference.oracle import Attention
from ring_attn_core.reference.tolerance import UNIT_ROUNDOFF

from .support.balanced import in_balanced_layout
from .support.cases import DTYPES, Case, check, computed_bound
from .support.features import EXTENTS, KEY_EXTENTS, KEY_MASKS
from .support.hybrid_steps import CHUNK, NEW
from .support.orders import check_same_bits
from .support.strategies import STRATEGIES, fitted

LONGEST = 70
DRAWS = 8
"""The number of draws of a case's data that bound its error."""

SLOW_IS_FINE: Any = list(HealthCheck)


@st.composite
def problems(draw: Callable[[st.SearchStrategy[Any]], Any], trees: bool = False) -> Case:
    """Ring sizes 1 to 8, sequences shorter than the ring, no tokens, no batch, odd sizes, cross-attention, all features."""
    integers, maybe = st.integers, lambda strategy: st.none() | strategy
    offset, side = integers(-LONGEST, LONGEST), integers(0, LONGEST)
    bands = st.one_of(st.just(full()), st.builds(causal, offset), st.builds(sliding_window, side, side, offset))
    kv_heads, head_dim, values_in_keys = draw(integers(1, 3)), draw(integers(1, 40)), draw(st.booleans())
    case = Case(
        layout=draw(st.sampled_from(list(LAYOUTS))),
        mask=draw(bands),
        ranks=min(draw(integers(1, 8)), draw(integers(1, 8))),  # small rings more often: JAX compiles every step
        heads=kv_heads * draw(integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_dim=draw(integers(1, head_dim if values_in_keys else 40)),
        length=draw(integers(0, LONGEST)),
        kv_length=draw(maybe(integers(0, LONGEST))),
        dtype=draw(st.sampled_from((*DTYPES, "float64"))),
        batch=draw(integers(0, 3)),
        more_slots=draw(integers(0, 2)),
        tiles=draw(maybe(st.tuples(integers(1, 9), integers(1, 9)))),
        scale=draw(maybe(st.floats(0.05, 0.5) | st.floats(-0.5, -0.05))),
        extents=draw(maybe(st.sampled_from(list(EXTENTS)))),
        key_extents="tree" if trees else draw(maybe(st.sampled_from(list(KEY_EXTENTS)))),
        key_mask=draw(maybe(st.sampled_from(KEY_MASKS))),
        softcap=draw(maybe(st.floats(1, 50))),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        dropout_rate=draw(st.just(0.0) | st.floats(0.05, 0.9)),
        seed=draw(integers(-(2**63), 2**63 - 1)),
        poison=draw(st.booleans()),
        values_in_keys=values_in_keys,
        strategy=draw(st.sampled_from(("auto", "auto", "auto", *STRATEGIES.values(), Gather(groups=kv_heads)))),
    )
    return fitted(case)


@st.composite
def balanced_problems(draw: Callable[[st.SearchStrategy[Any]], Any], trees: bool = False, name: str = "") -> Case:
    """Problems in balanced layouts, of the documents of their extents if these are documents, with as many queries as keys.

    ``name``: the strategy of all problems; "": any.
    """
    case = draw(problems(trees))
    strategy = STRATEGIES.get(name, name) or draw(st.sampled_from(("auto", "direct", case.strategy)))
    extents = draw(st.sampled_from(("documents", case.extents)))
    case = replace(case, strategy=strategy, extents=extents, length=max(case.length, 1), kv_length=None, more_slots=0)
    return in_balanced_layout(fitted(case), draw(st.integers(0, 2)))


def under(name: str, drawn: st.SearchStrategy[Case]) -> st.SearchStrategy[Case]:
    """Return the drawn cases under one strategy, with numbers of ranks and heads that it accepts."""
    return drawn.map(lambda case: fitted(replace(case, strategy=STRATEGIES.get(name, name))))


def in_global_order(case: Case) -> Case:
    """Return the case under order="global", with the features that are drawn for one rank."""
    alone = replace(case, ranks=1, order="global", strategy="auto")
    return replace(alone.given(**alone.features), ranks=case.ranks)


def fuzz(run: Callable[[Case], Attention], examples: int, number: int = 0, drawn: st.SearchStrategy[Case] | None = None) -> None:
    """Check what ``run`` gives for that many random cases, those of seed ``number``; raises for the smallest case that fails.

    ``drawn``: the cases, by default ``problems()``.
    """
    print(f"{examples} problems of seed {number}")

    @seed(number)
    @settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=SLOW_IS_FINE)
    @given(problems() if drawn is None else drawn)
    def is_exact(case: Case) -> None:
        got = run(case)
        if case.order == "global":
            check_same_bits(case, run(replace(case, ranks=1, layout="contiguous", more_slots=0)), got, str(case))
        try:
            check(case, got)
        except AssertionError:
            check(case, got, lucky_bound)

    is_exact()


def lucky_bound(case: Case, name: str) -> float:
    """The bound of a case among thousands, in which the plain computation is more exact than usual by chance or by its numbers.

    The largest bound of DRAWS draws of the case's data, what one rounding of lse, which is carried from step to step, makes of a
    probability (lse times the unit roundoff), and what ``of_products`` returns.
    """
    lse = case.expected.lse[np.isfinite(case.expected.lse)].astype(np.float64)
    rounded = UNIT_ROUNDOFF[case.dtype] * float(np.sqrt(np.mean(lse * lse))) if lse.size else 0.0
    rounded += of_products(case, name) if name in ("lse", "dq", "dk") else 0.0
    return rounded + max(computed_bound(replace(case, data=data), name) for data in range(DRAWS))


def of_products(case: Case, name: str) -> float:
    """Return the relative error that rounding the dot products q . k leaves in lse, and dout . v in dq and dk.

    Such a product is wrong by the unit roundoff times the lengths of its vectors, however small it is. The gradient of a score
    is a difference of two, of equal numbers if the query sees one key.
    """
    length = {x: np.linalg.norm(case.arrays[x].astype(np.float64), axis=-1) for x in ("q", "k", "v", "dout")}
    k, v = length["k"].max(initial=0), length["v"].max(initial=0)
    products = {"lse": length["q"] * k, "dq": length["dout"] * v * k, "dk": length["dout"] * v * length["q"]}
    scale = case.arrays["q"].shape[-1] ** -0.5 if case.scale is None else abs(case.scale)
    error = UNIT_ROUNDOFF[case.dtype] * scale * float(np.linalg.norm(products[name]))
    exact = getattr(case.expected, name)
    exact = exact[np.isfinite(exact)].astype(np.float64)
    return error / max(float(np.linalg.norm(exact)), 0.01 * max(exact.size, 1) ** 0.5)


def on_torch(examples: int, number: int, drawn: st.SearchStrategy[Case]) -> None:
    from .support.spawn import Ranks
    from .torch.ring import run_or_restart
    from .torch.test_peers import over_files

    def run(case: Case) -> Attention:
        return run_or_restart(pool, case, over_files if case.strategy == "push" else None)

    pool = Ranks()
    fuzz(run, examples, number, drawn)
    pool.close()


def on_jax(examples: int, number: int, drawn: st.SearchStrategy[Case]) -> None:
    from .jax.ring import run_once

    fuzz(run_once, examples, number, drawn)


@st.composite
def recurrences(draw: Callable[[st.SearchStrategy[Any]], Any], rule: str) -> tuple[Any, ...]:
    """Return a drawn call of a rule: ranks, rule, layout, whether rows are packed documents, and the rows."""
    length = draw(st.integers(1, LONGEST))
    row = st.lists(st.integers(1, length), unique=True, max_size=6).map(lambda ends: sorted({*ends, length}))
    rows = [[b - a for a, b in zip([0, *ends], ends, strict=False)] for ends in draw(st.lists(row, min_size=1, max_size=2))]
    layout = draw(st.sampled_from(("zigzag", "contiguous", "balanced")))
    return draw(st.integers(1, 8)), rule, layout, draw(st.booleans()) or layout == "balanced", rows


@st.composite
def hybrids(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[Any, ...]:
    """Return a drawn ring, the mixers of a model, and the chunks and new tokens that its cache gets."""
    recurrent = draw(st.lists(st.sampled_from(("gated_delta_net", "mamba2")), min_size=1, max_size=3))
    place = draw(st.integers(0, len(recurrent)))
    lengths = st.tuples(*[st.integers(0, CHUNK)] * 2).filter(any)
    real = st.integers(1, NEW).flatmap(lambda n: st.tuples(*[st.lists(st.booleans(), min_size=n, max_size=n)] * 2))
    call = st.tuples(st.just("prompts"), lengths) | st.tuples(st.just("tokens"), real)
    calls = draw(st.lists(call, min_size=1, max_size=4))
    mixers = *recurrent[:place], "attention", *recurrent[place:]
    return draw(st.integers(1, 8)), draw(st.sampled_from(("zigzag", "contiguous"))), mixers, calls


def fuzz_errors(errors: Callable[..., list[float]], examples: int, number: int, drawn: st.SearchStrategy[Any]) -> None:
    """Check that the errors of that many random calls are those of rounding in float64."""

    @seed(number)
    @settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=SLOW_IS_FINE)
    @given(drawn)
    def is_exact(each: tuple[Any, ...]) -> None:
        assert max(errors(*each), default=0) < 1e-12, each

    is_exact()


def fuzz_recurrences(framework: str, examples: int, number: int) -> None:
    """Compare that many random calls of each rule, their results and gradients, with the rule token by token in float64."""
    from .claims.test_recurrences import errors
    from .jax.framework import Jax
    from .support.recurrences import SEQUENTIAL
    from .support.spawn import Ranks
    from .torch.framework import Torch

    pool = Ranks()
    package = Jax() if framework == "jax" else Torch(lambda: pool)
    for rule in SEQUENTIAL:
        fuzz_errors(partial(errors, package), examples, number, recurrences(rule))
    pool.close()


def fuzz_hybrids(framework: str, examples: int, number: int) -> None:
    """Compare the logits of that many random models and caches with those of the model on all tokens so far, in float64."""
    import jax

    from . import test_hybrid_generation as hybrid
    from .support.spawn import Ranks

    pool = Ranks()

    def in_torch(ranks: int, layout: str, mixers: tuple[str, ...], calls: Any) -> list[float]:
        return [*chain(*pool(ranks, hybrid.errors_in_torch, layout, mixers, hybrid.expected(mixers), calls))]

    def in_jax(ranks: int, layout: str, mixers: tuple[str, ...], calls: Any) -> list[float]:
        with jax.enable_x64(True):
            return hybrid.on_jax(ranks, layout, mixers, hybrid.expected(mixers), calls)[2]

    fuzz_errors(in_jax if framework == "jax" else in_torch, examples, number, hybrids())
    pool.close()


def main() -> None:
    frameworks = {"torch": on_torch, "jax": on_jax}
    parser = argparse.ArgumentParser(description="Random problems against float64.")
    parser.add_argument("framework", nargs="*", default=[*frameworks], help="torch, jax or both, which is the default")
    parser.add_argument("--problems", type=int, default=2000, help="for each framework")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same problems")
    parser.add_argument("--trees", action="store_true", help="with a prefix tree in each problem")
    parser.add_argument("--balanced", action="store_true", help="with a balanced layout in each problem")
    parser.add_argument("--strategy", nargs="+", default=[""], choices=["ring", *STRATEGIES, "push"], help="of all problems")
    parser.add_argument("--order", action="store_true", help='under order="global", on one rank too')
    parser.add_argument("--recurrences", action="store_true", help="of gated_delta_rule, state_space and causal_conv instead")
    parser.add_argument("--hybrids", action="store_true", help="of hybrid models that generate instead")
    arguments = parser.parse_args()
    if "jax" in arguments.framework and "push" in arguments.strategy:
        parser.error('"push" exists in PyTorch only: pass the framework torch')
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    for name, strategy in product(arguments.framework, arguments.strategy):
        drawn = balanced_problems(arguments.trees, strategy) if arguments.balanced else problems(arguments.trees)
        drawn = drawn if arguments.balanced or not strategy else under(strategy, drawn)
        drawn = drawn.map(in_global_order) if arguments.order else drawn
        began = time.perf_counter()
        if arguments.recurrences:
            fuzz_recurrences(name, arguments.problems, arguments.seed)
            continue
        if arguments.hybrids:
            fuzz_hybrids(name, arguments.problems, arguments.seed)
            continue
        frameworks[name](arguments.problems, arguments.seed, drawn)
        called, seconds = f"{name} {strategy}".strip(), time.perf_counter() - began
        print(f"{called}: none of {arguments.problems} failed, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
