"""``ring-attn compare --leak``: every planted leak is found in both frameworks, and nothing leaks from ours."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from ring_attn_cli import compare
from ring_attn_cli.compare.cases import Case
from ring_attn_cli.compare.leaks import KEY, QUERY, Leak, Probed, _changes
from ring_attn_cli.compare.messages import Change
from ring_attn_cli.main import app

for package in ("torch", "jax", "flax"):
    pytest.importorskip(package)


pytestmark = pytest.mark.usefixtures("warm_workers")
PLANTED = "parity_tests.support.leaking"
LEAKS = {
    "window_one_too_long": ("key", "out", 9),
    "document_border_off_by_one": ("key", "out", None),
    "zigzag_taken_for_contiguous": ("key", "out", None),
    "padding_seen": ("padding", "out", None),
    "future_key_in_the_last_tile": ("key", "out", None),
    "masked_keys_in_the_backward": ("query", "dk", None),
}
"""For each planted leak: what is changed, an array that moves, and how much later its token is, where that is one number."""
IN_JAX = ("window_one_too_long", "padding_seen")
"""The leaks that are planted in JAX too, where each takes seconds to compile; the others in JAX in the long test."""

SIZES: dict[str, Any] = {"length": 61, "kv_heads": 4, "head_dim": 8, "mask": "window:8", "documents": 3, "key_mask": True}


def find(*names: str, ranks: tuple[int, ...] = (2,)) -> dict[tuple[str, str, int], Probed]:
    """Return what one probe finds, by the function's name, the framework and the number of ranks."""
    probed = compare.find_leaks(*names, ranks=ranks, **SIZES)
    assert {each.ranks for each in probed} == {*ranks}
    return {(each.variant.rpartition(":")[2], each.framework, each.ranks): each for each in probed}


@pytest.fixture(scope="module")
def found(warm_workers: None) -> dict[tuple[str, str, int], Probed]:
    """One probe of all functions, for processes are slow to start."""
    return find("ring", *(f"{'' if name in IN_JAX else 'torch:'}{PLANTED}:{name}" for name in ("no_leak", *LEAKS)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "framework"), [*((name, "torch") for name in LEAKS), *((name, "jax") for name in IN_JAX)])
def test_a_planted_leak_is_found(found: dict[tuple[str, str, int], Probed], name: str, framework: str):
    check_found(found[name, framework, 2], name)


def check_found(probed: Probed, name: str) -> None:
    """Check that the probe names the right change, and a token that it must not reach."""
    kind, array, later = LEAKS[name]
    leaks = [leak for leak in probed.leaks if (leak.kind, leak.array) == (kind, array)]
    assert leaks and all(leak.largest > 1e-4 for leak in leaks), probed
    if later:
        assert {leak.token - (leak.changed or 0) for leak in leaks} == {later}
    if name == "masked_keys_in_the_backward":
        assert {leak.array for leak in probed.leaks} == {"dq", "dk"}, "the forward sees what it may"
        assert not any(probed.case.masks["key_mask"][0][leak.token] for leak in leaks), "dk of a key that no query may see"


@pytest.mark.parametrize(("name", "framework"), [("ring", "jax"), ("ring", "torch"), ("no_leak", "torch")])
def test_nothing_leaks_from_ours_nor_from_an_attention_without_a_leak(
    found: dict[tuple[str, str, int], Probed], name: str, framework: str
):
    check_tight(found[name, framework, 2])


def check_tight(probed: Probed) -> None:
    assert not probed.leaks, probed
    assert probed.changes >= 2 * 2 * 2 * probed.ranks + 1  # keys and queries, at both edges of a rank's two runs, and the padding


@pytest.mark.exhaustive
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_planted_leak_is_found_on_one_two_and_four_ranks(framework: str):
    planted = (f"{framework}:{PLANTED}:{name}" for name in ("no_leak", *LEAKS))
    found = find(*planted, ranks=(1, 2, 4))
    assert len(found) == 3 * (1 + len(LEAKS))
    for (name, _, ranks), probed in found.items():
        if name == "no_leak" or (name == "zigzag_taken_for_contiguous" and ranks == 1):  # one rank has the tokens in order
            assert not probed.leaks, probed
        else:
            check_found(probed, name)


@pytest.mark.exhaustive
def test_nothing_leaks_from_ours_on_one_and_four_ranks():
    assert [str(each) for each in find("ring", ranks=(1, 4)).values() if each.leaks] == []


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_the_last_token_before_the_padding_is_changed(layout: str):
    case = Case(length=61, layout=layout)
    for ranks in (1, 2, 4):
        changes = _changes(case, case.plan(ranks))
        assert {Change(KEY, 60), Change(QUERY, 60)} <= {*changes}
        assert all(change.token is None or change.token < 61 for change in changes)


def test_a_leak_is_told_in_words():
    leak = Leak("key", 40, "out", 49, (0, 1), 0.25, 2)
    assert str(leak) == "the key of token 40 (rank 0) moves out of token 49 (rank 1), 9 tokens later and 1 more, by 0.25"
    assert str(Leak("padding", None, "dk", 3, (None, 0), 0.5, 1)) == "the padding moves dk of token 3 (rank 0), by 0.5"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ring", "layer"), "--leak knows what attention on q, k and v may see: leave out layer"),
        (("ring", "--json", "leaks.json"), "--leak prints what leaks and measures nothing: leave out --json and --png"),
    ],
)
def test_unsupported_options_of_the_probe_are_refused_before_anything_starts(arguments: tuple[str, ...], words: str):
    answer = CliRunner().invoke(app, ["compare", "--leak", *arguments])
    assert answer.exit_code == 2
    assert words in answer.output
