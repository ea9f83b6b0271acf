"""The table of features in docs/features.md, derived from the tests: "yes" if a test of that framework covers the feature.

    python -m parity_tests.support.feature_table      writes the table into docs/features.md

If a feature is a field of Case, each test that is parametrised over cases covers it, because all of these compare out, lse and
every gradient with float64 (``check``). Any other feature names its tests, and has no layouts unless the tests cover all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ring_attn_core import LAYOUTS

from .cases import Case

PAGE = Path(__file__).resolve().parents[2] / "docs" / "features.md"
BEGIN, END = "<!-- features: python -m parity_tests.support.feature_table -->\n", "<!-- end of features -->"
FRAMEWORKS = {"JAX": "jax", "PyTorch": "torch"}


@dataclass(frozen=True)
class Feature:
    """A row. ``of`` selects its cases; or ``tests`` names a test of claims/, or by framework, as ``file::function``."""

    title: str
    of: Callable[[Case], bool] | None = None
    tests: dict[str, str] | str = ""
    gradients: str = "yes"

    def layouts(self, framework: str) -> frozenset[str]:
        """Return the layouts in which a test of the framework covers the feature; empty without a test."""
        if self.of:
            return frozenset(str(case.layout) for case in cases(framework) if self.of(case))
        room, test = ("claims", self.tests) if isinstance(self.tests, str) else (FRAMEWORKS[framework], self.tests[framework])
        name, function = test.split("::")
        tried = getattr(import_module(f"parity_tests.{room}.{name}"), function)
        tried = [*_parameters(tried, "layout", framework), *(case.layout for case in _parameters(tried, "case", framework))]
        return frozenset(map(str, tried)) or frozenset({str(Case.layout)})


def _features_of(case: Case) -> int:
    masks = case.extents, case.key_extents, case.key_mask
    return sum(map(bool, (*masks, case.softcap, case.sinks, case.alibi, case.dropout_rate)))


FEATURES = [
    Feature("`full()`, `causal(offset)`", lambda case: case.mask.hi is None),
    Feature("`sliding_window(before, after, offset)`, only the hops it needs", lambda case: case.mask.hi is not None),
    Feature("`extents`: packed documents", lambda case: case.extents == "documents"),
    Feature("`extents`: prefix-LM", lambda case: case.extents == "prefix"),
    Feature("`extents`: left and right padding", lambda case: case.extents == "padding"),
    Feature("`extents`: any interval for every query", lambda case: case.extents == "any"),
    Feature("`key_extents`: prefix trees", lambda case: case.key_extents == "tree"),
    Feature("`key_extents`: any interval for every key", lambda case: case.key_extents == "any"),
    Feature("`key_mask`: any pattern, rows and shards without a key too", lambda case: case.key_mask in ("shard", "none")),
    Feature("`softcap`", lambda case: case.softcap is not None),
    Feature("`sinks`", lambda case: case.sinks),
    Feature("`alibi_slopes`", lambda case: case.alibi, gradients="slopes are constants"),
    Feature("`dropout_rate`, `dropout_seed`", lambda case: case.dropout_rate > 0),
    Feature("four and more of these at once", lambda case: _features_of(case) >= 4),
    Feature("cross-attention: keys of another length (`kv_length`)", lambda case: case.kv_length not in (None, case.length)),
    Feature("grouped-query and multi-query heads", lambda case: 1 <= case.kv_heads < case.heads),
    Feature("`v_dim` other than head_dim, odd head dims", lambda case: case.v_dim != case.head_dim),
    Feature("`v=None`, `v_dim`: values that are columns of keys", lambda case: case.values_in_keys),
    Feature("any length and number of ranks, padding (`length`)", lambda case: case.length % case.ranks > 0),
    Feature("bfloat16 and float16, state between hops in float32", lambda case: case.dtype in ("bfloat16", "float16")),
    Feature("float32; float64 throughout", lambda case: case.dtype in ("float32", "float64")),
    Feature("NaN where nobody may look changes nothing", tests="test_ring::test_nan_in_hidden_tokens_changes_no_bit"),
    Feature(
        '`strategy`: `"ring"`, `"direct"`, `"two_way"`, `"gather"`, `Gather`, `"ulysses"`, `TwoLevel`',
        tests="test_strategies::test_every_feature_at_once_is_exact_and_hides_nan",
    ),
    Feature(
        '`order="global"`: the same bits on any number of ranks',
        tests="test_order::test_results_have_the_same_bits_on_every_ring",
    ),
    Feature("`attend_block`, `merge`", tests="test_blocks::test_blocks_merged_are_the_whole"),
    Feature(
        "batch, sequence and heads sharded together, rings over a part of the world",
        tests={
            "JAX": "test_sharded::test_every_feature_on_a_data_seq_tensor_mesh_is_exact",
            "PyTorch": "test_comm::test_sub_groups_shard_batch_and_sequence_together",
        },
    ),
    Feature(
        "checkpointing that runs the forward ring once",
        tests={
            "JAX": "test_shard_map::test_remat_runs_one_forward_ring_where_out_and_lse_are_kept",
            "PyTorch": "test_op::test_selective_checkpointing_runs_one_forward_ring",
        },
    ),
]


@cache
def cases(framework: str) -> frozenset[Case]:
    """Return every case over which a test of claims/test_ring.py is parametrised for the framework."""
    module = import_module("parity_tests.claims.test_ring")
    return frozenset(case for test in _tests(module) for case in _parameters(test, "case", framework))


def _tests(module: ModuleType) -> Iterator[Callable]:
    return (x for name, x in vars(module).items() if name.startswith("test_"))


def _parameters(test: Callable, name: str, framework: str) -> Iterator[Any]:
    for mark in (mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        for value in mark.args[1]:
            row = dict(zip(names, getattr(value, "values", value if len(names) > 1 else (value,)), strict=True))
            if name in row and row.get("framework", FRAMEWORKS[framework]) == FRAMEWORKS[framework]:
                yield row[name]


def table() -> str:
    """Return the table in Markdown. A feature without a test in a framework is "no" there."""
    lines = [f"| feature | {' | '.join(FRAMEWORKS)} | gradients | layouts |", "|---|---|---|---|---|"]
    for feature in FEATURES:
        tried = [feature.layouts(framework) for framework in FRAMEWORKS]
        works = ["yes" if layouts else "no" for layouts in tried]
        both = frozenset.intersection(*tried)
        named = "all" if both == set(LAYOUTS) else ", ".join(sorted(both)) if feature.of else ""
        lines.append(f"| {feature.title} | {' | '.join(works)} | {feature.gradients} | {named} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Return the page's text with the current table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
