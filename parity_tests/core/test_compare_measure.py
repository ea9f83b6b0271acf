"""Tests of ``ring-attn compare`` without any framework: its measurements, and its calls of a user's function."""

from __future__ import annotations

import importlib
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ring_attn_cli.compare import measure, user
from ring_attn_cli.compare.cases import Case
from ring_attn_cli.compare.messages import Outcome, cut, join
from ring_attn_cli.compare.oracles import ORACLES
from ring_attn_cli.compare.variants import choose
from ring_attn_cli.compare.worker import describe, find_line, make_importable
from ring_attn_core.layouts import LAYOUTS

PLANTED = "parity_tests.support.planted"


@pytest.mark.parametrize(
    ("dtype", "gap"), [("float64", 2.0**-52), ("float32", 2.0**-23), ("float16", 2.0**-10), ("bfloat16", 2.0**-7)]
)
def test_an_ulp_is_the_gap_between_two_numbers_of_the_dtype(dtype: str, gap: float):
    exact = np.array([1.0, 1.5, -1.0], np.longdouble)
    assert measure.largest_ulps(exact + np.array([0, 3 * gap, 0]), exact, dtype) == 3
    assert measure.largest_ulps(4 * exact + np.array([0, 3 * gap, 0]), 4 * exact, dtype) == 0.75
    assert measure.largest_ulps(np.append(exact, gap), np.append(exact, 0), dtype) < 3  # what is 0 has no last place of its own


def test_only_the_same_infinity_has_no_difference():
    exact = np.array([1.0, -np.inf])
    assert measure.largest_difference(exact, exact) == 0 and measure.largest_ulps(exact, exact, "float32") == 0
    for wrong in ([1.0, np.inf], [1.0, np.nan], [1.0, 0.0], [np.nan, -np.inf]):
        assert measure.largest_difference(np.array(wrong), exact) == np.inf


def test_only_equal_bits_have_no_distance():
    x = np.array([1.0, 0.0], np.float32)
    assert measure.apart(x, x.copy()) == 0
    assert measure.apart(x, np.array([1.0, -0.0], np.float32)) > 0
    assert measure.apart(x, np.nextafter(x, np.float32(2))) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_come_together_as_they_were(layout: str):
    plan = Case(length=37, layout=layout).plan(4)
    x = np.arange(2 * 37 * 3.0).reshape(2, 37, 3)
    shards = {"out": cut(x, plan, np.nan), "dsinks": [np.ones(2)] * 4, "loss": [np.array(5)] * 4}
    of_each_rank = [Outcome({name: [of[rank]] for name, of in shards.items()}, frozenset()) for rank in range(4)]
    whole = join([Outcome(shards, frozenset())], frozenset({"out"}), plan)
    assert all(np.array_equal(x, whole[name]) for name, x in join(of_each_rank, frozenset({"out"}), plan).items())
    np.testing.assert_array_equal(whole["out"], x)
    assert whole["dsinks"].tolist() == [4, 4] and whole["loss"] == 5


def test_the_truth_of_a_long_sequence_is_that_of_the_first_heads(monkeypatch: pytest.MonkeyPatch):
    case, oracle = Case(length=24, head_dim=8, batch=2, sinks=True, alibi=True, key_mask=True), ORACLES["attention"]
    given = oracle.inputs(case)
    whole = oracle.truth(case, given, given.cotangents)
    monkeypatch.setattr("ring_attn_cli.compare.oracles.MAX_PAIRS", 10)
    part = oracle.truth(case, given, given.cotangents)
    assert part.part and not whole.part and "dsinks" not in part.exact
    for name, x in part.exact.items():
        np.testing.assert_allclose(x, measure.first(whole.exact[name], x), rtol=1e-12)
    assert part.exact["dk"].shape == (1, 24, 1, 8) and part.exact["dq"].shape == (1, 24, 2, 8)


def given_to(name: str, **case: Any) -> Any:
    """Return the result of calling that planted function with numpy arrays."""
    text = f"{PLANTED}:{name}"
    function = user.load(text)
    offered = {"mask": None, "scale": 1.0, "length": 8, "sinks": None, "return_lse": True}
    arguments = user.take(function, text, offered, Case(**case))
    user.check_length(text, arguments, Case(length=8), 8)
    q, k = np.ones((1, 8, 4, 16)), np.ones((1, 8, 2, 16))
    return user.call(function, text, {"q": q, "k": k, "v": k}, arguments)


@pytest.mark.parametrize(
    ("name", "case", "words"),
    [
        ("nothing", {}, f"{PLANTED} has no function 'nothing': it has .*wrong_scale"),
        ("needs_more", {}, "needs bandwidth, and only arguments of ring_attention are passed"),
        ("own_keys", {"sinks": True}, "takes no sinks, which this case has"),
        ("raises", {}, "raises failed: RuntimeError: there is no such kernel .*planted.py, line"),
        ("half_of_q", {}, r"returned out \[1, 4, 4, 16\], expected \[1, 8, 4, 16\]"),
        ("nothing_at_all", {}, "returned nothing: it must return out"),
    ],
)
def test_a_users_mistake_is_said_in_words(name: str, case: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        given_to(name, **case)


def test_a_module_that_does_not_exist_is_said():
    with pytest.raises(ValueError, match="there is no module 'no_such_module', neither in this folder nor installed"):
        user.load("no_such_module:f")


def test_a_file_of_the_folder_stands_in_for_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("mine_alone", "wave"):
        (tmp_path / f"{name}.py").write_text("def attention(q, k, v):\n    return q\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    make_importable(str(tmp_path))
    assert user.load("mine_alone:attention").__module__ == "mine_alone"
    assert str(tmp_path) not in str(importlib.import_module("wave").__file__)
    with pytest.raises(
        ValueError, match=r"wave has no function 'attention'.*: wave.py here is not read, .*: give the file another"
    ):
        user.load("wave:attention")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mymodule.py:f", "mymodule.py:f names a file: write the module's name, mymodule:f"),
        ("./mymodule.py:f", "write the name of a module, as import does, and no path"),
        ("../mymodule:f", "write the name of a module, as import does, and no path"),
        ("some/mymodule:f", "write the name of a module, as import does, and no path"),
    ],
)
def test_a_file_in_place_of_a_module_is_said(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        user.load(text)


def test_a_function_of_one_framework_that_runs_in_both_is_said():
    with pytest.raises(ValueError, match="needs group, which ring_attention has in PyTorch only: write torch:mymodule:f"):
        user.take(lambda q, k, v, group: q, "mymodule:f", {"axis_name": "seq"}, Case())


def test_padding_is_refused_for_a_function_that_takes_no_length():
    with pytest.raises(ValueError, match="takes no length, and 7 tokens are padded to 8 in zigzag"):
        user.check_length("m:f", {}, Case(length=7), 8)


def test_functions_of_two_frameworks_are_each_others_twins():
    first, second, third = choose(("jax:m:f", "torch:m:g", "torch:m:h"))
    assert first.pair == second.pair != third.pair and first.frameworks == ("jax",)


def test_the_place_of_a_rank_is_that_of_its_main_thread():
    thread = "Thread 0x1 (most recent call first):\n"
    others = f'Timeout (0:00:08)!\n{thread}  File "/a/b.py", line 3 in run\n\n{thread}'
    assert find_line(others + '  File "/a/mine.py", line 7 in f\n  File "/a/c.py", line 9 in g\n') == "mine.py, line 7 in f"
    assert find_line("nothing of the kind") is None


def test_a_narrow_terminal_cuts_no_number():
    rich = pytest.importorskip("rich.console")
    from ring_attn_cli.compare import report
    from ring_attn_cli.compare.comparison import Comparison, VariantResult
    from ring_attn_cli.compare.sweep import make_sweep

    numbers = [measure.Quantity("dsinks", 2.3e-7, 5.6e-7, 12.34, 7.1e-7, 2e-7, 3e-12)]
    result = VariantResult(Case(), "ring", "torch", 2, tuple(numbers), (), (0.01,), 10**9)
    found = Comparison(make_sweep(["ring"], 2, "torch", 1, 9.0), (result,), (), {})
    for columns in (20, 40, 60):
        width = report.width_of(columns)
        console = rich.Console(width=width, record=True, file=io.StringIO())
        console.print(report.draw(found, width))
        text = console.export_text()
        assert "…" not in text and "2.3e-07" in text and "3e-12" in text, text


def test_a_comparison_without_a_result_does_not_pass():
    pytest.importorskip("rich.console")
    from ring_attn_cli.compare.comparison import Comparison
    from ring_attn_cli.compare.sweep import make_sweep

    assert not Comparison(make_sweep(["ring"], 2, "torch", 1, 9.0), (), (), {}).passed


@pytest.mark.parametrize(("device", "note"), [("cpu", False), ("gpu", True)])
@pytest.mark.parametrize("width", [70, 120])
def test_the_peak_of_a_process_is_not_shown_as_that_of_a_run(device: str, note: bool, width: int):
    rich = pytest.importorskip("rich.console")
    from ring_attn_cli.compare import export, report
    from ring_attn_cli.compare.comparison import Comparison, VariantResult
    from ring_attn_cli.compare.sweep import make_sweep

    numbers = (measure.Quantity("out", 2.3e-7, 5.6e-7, 12.34, 7.1e-7, 2e-7, 3e-12),)
    peaks = {"torch": 10**9, "jax": 2 * 10**9}
    results = tuple(VariantResult(Case(device=device), "ring", name, 2, numbers, (), (0.01,), n) for name, n in peaks.items())
    found = Comparison(make_sweep(["ring"], 2, "jax,torch", 1, 9.0), results, (), {})
    console = rich.Console(width=width, record=True, file=io.StringIO())
    console.print(report.draw(found, width))
    text = " ".join(console.export_text().split())
    shown = "MiB of JAX on GPUs (*): the peak of its process so far" in text, "1907.3*" in text, "953.7*" in text
    assert shown == (note, note, False)
    assert [each["peak_of"] for each in export.describe(found)["results"]] == ["run", "process" if note else "run"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 46.6 PiB"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried 9 bytes."),
        RuntimeError("CUDA out of memory. Tried to allocate 9 GiB."),
    ],
)
def test_a_case_too_large_for_memory_is_answered_with_the_options_to_lower(error: Exception):
    assert describe(error).endswith(f"({error}): lower --batch, --length, --heads or --head-dim")
