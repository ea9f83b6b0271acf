"""``ring-attn compare``: every variant that a CPU runs keeps its bounds, planted mistakes are found, and nothing bad hangs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from multiprocessing import active_children
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from typer.testing import CliRunner

from ring_attn_cli import compare
from ring_attn_cli.compare import comparison, export, user
from ring_attn_cli.compare.comparison import Comparison, choose_contestants
from ring_attn_cli.compare.sweep import make_sweep
from ring_attn_cli.main import app

for package in ("torch", "jax", "flax", "matplotlib"):
    pytest.importorskip(package)


pytestmark = pytest.mark.usefixtures("warm_workers")
PLANTED = "parity_tests.support.planted"
FOUND = {
    "wrong_scale": "the scale is wrong: scores are multiplied by 1 where 0.25 was said, 4 times as much, as if they were not",
    "in_bfloat16": "bfloat16 where float32 was said",
    "lost_gradient": "dk is zero everywhere: the gradient is lost",
    "half_of_dv": "dv is 0.5 times what it should be",
    "strict_mask": "the mask is wrong: no query sees itself, where causal was said",
}
"""The mistakes, and how each is named."""

IN_JAX = ("strict_mask",)
"""The mistake that is planted in JAX too, where each takes seconds to compile; the others in JAX with ``--full``."""

SIZES: dict[str, Any] = {
    "length": 61,
    "head_dim": 16,
    "repeats": 1,
    "segments": (16, 40),
    "block": 8,
    "summaries": 2,
    "window": 11,
}
BOTH = ("jax", "torch")
IN_LAYERS = "layer", "transformer", "dilated", "summary"
"""Variants that take JAX tens of seconds to compile: of both frameworks in ``make test-all`` only."""


@pytest.fixture(scope="module")
def found(warm_workers: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    """One comparison of attention and of the planted mistakes, for processes are slow to start."""
    folder = tmp_path_factory.mktemp("compare")
    names = ["ring", "sdpa", *(f"{'' if name in IN_JAX else 'torch:'}{PLANTED}:{name}" for name in FOUND)]
    return compare.run(*names, json=folder / "compare.json", png=folder / "compare.png", **SIZES), folder


@pytest.fixture(scope="module")
def found_in_jax(warm_workers: None) -> Comparison:
    """Return one comparison of the mistakes that ``found`` has in PyTorch only."""
    return compare.run(*(f"jax:{PLANTED}:{name}" for name in FOUND if name not in IN_JAX), **SIZES)


@pytest.fixture(scope="module")
def of_layers(warm_workers: None) -> Callable[[tuple[str, ...]], Comparison]:
    """Return a function of frameworks that compares the variants of layers once."""
    return cache(lambda frameworks: compare.run(*IN_LAYERS, framework=",".join(frameworks), **SIZES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frameworks", "variant"),
    [
        *((BOTH, "ring"), (("torch",), "sdpa"), *((("torch",), name) for name in IN_LAYERS)),
        *(pytest.param(BOTH, name, marks=pytest.mark.exhaustive) for name in IN_LAYERS),
    ],
)
def test_every_variant_of_a_cpu_keeps_its_bounds_on_one_device_and_on_a_ring(
    found: tuple[Comparison, Path], of_layers: Callable[..., Comparison], frameworks: tuple[str, ...], variant: str
):
    comparison = of_layers(frameworks) if variant in IN_LAYERS else found[0]
    results = [result for result in comparison.results if result.variant == variant]
    rings = (1,) if variant == "sdpa" else (1, 2)
    assert [(each.framework, each.ranks) for each in results] == [(name, n) for name in frameworks for n in rings]
    for each in results:
        assert each.passed and not each.diagnosis, each
        assert len(each.seconds) == 1 and min(each.seconds) > 0
        for quantity in each.quantities:
            assert (quantity.from_other_framework is None) == (frameworks != BOTH)
            assert (quantity.from_one_device is None) == (each.ranks == 1)
            assert max(quantity.from_other_framework or 0, quantity.from_one_device or 0) < 1e-5


def test_a_variant_that_a_cpu_does_not_run_is_left_out_in_words():
    sweep = make_sweep(["all"], 2, ",".join(BOTH), patience=60, **SIZES)
    reasons = {(each.variant, each.framework): each.reason for each in choose_contestants(sweep, BOTH)[1]}
    assert "pass --device gpu" in reasons["flash", "torch"]
    assert reasons["flash", "jax"] == "it is there in PyTorch only"
    assert reasons["sdpa", "torch"] == "it is attention on one device"


@pytest.mark.parametrize(("framework", "mistake"), [*(("jax", name) for name in IN_JAX), *(("torch", name) for name in FOUND)])
def test_a_planted_mistake_is_named_in_either_framework(found: tuple[Comparison, Path], mistake: str, framework: str):
    check_named(found[0], mistake, framework)


@pytest.mark.full
@pytest.mark.parametrize("mistake", [name for name in FOUND if name not in IN_JAX])
def test_a_planted_mistake_is_named_in_jax(found_in_jax: Comparison, mistake: str):
    check_named(found_in_jax, mistake, "jax")


def check_named(comparison: Comparison, mistake: str, framework: str) -> None:
    """Check that the mistake is found on one rank and on two, and that its name is the only diagnosis."""
    planted = f"{PLANTED}:{mistake}"
    results = [each for each in comparison.results if each.variant.endswith(planted) and each.framework == framework]
    assert [each.ranks for each in results] == [1, 2]
    for each in results:
        assert not each.passed
        assert len(each.diagnosis) == 1 and each.diagnosis[0].startswith(FOUND[mistake]), each.diagnosis


def test_the_files_hold_every_result(found: tuple[Comparison, Path]):
    comparison, folder = found
    written = json.loads((folder / "compare.json").read_text())
    assert written["schema"] == export.SCHEMA and written["passed"] is False and written["swept"] is None
    assert {"command", "date", "commit", "versions", "hardware", "left_out"} <= written.keys()
    assert [(each["variant"], each["framework"], each["ranks"]) for each in written["results"]] == [
        (each.variant, each.framework, each.ranks) for each in comparison.results
    ]
    first = written["results"][0]
    assert first["case"]["length"] == 61 and [each["name"] for each in first["quantities"]] == ["out", "lse", "dq", "dk", "dv"]
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_the_documented_schema_is_what_is_written(found: tuple[Comparison, Path]):
    written = json.loads((found[1] / "compare.json").read_text())
    page = (Path(__file__).parents[1] / "docs" / "compare.md").read_text()
    result, quantity = written["results"][0], written["results"][0]["quantities"][0]
    for name in {*written, *result, *quantity, *result["case"], *written["left_out"][0], *written["hardware"]}:
        assert f"`{name}`" in page, f"docs/compare.md says nothing of {name}"


@pytest.mark.slow
def test_a_sweep_over_features_runs_from_the_command_line_and_draws(tmp_path: Path):
    options = ["--framework", "torch", "--repeats", "1", "--ranks", "2", "--length", "31,64", "--head-dim", "8"]
    features = [
        "--sinks",
        "--alibi",
        "--softcap",
        "4",
        "--dropout-rate",
        "0.1",
        "--key-mask",
        "--documents",
        "3",
        "--mask",
        "window:9",
    ]
    done = ring_attn("ring", *options, *features, "--json", str(tmp_path / "s.json"), "--png", str(tmp_path / "s.png"))
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "s.json").read_text())
    assert [(each["case"]["length"], each["ranks"]) for each in written["results"]] == [(n, r) for n in (31, 64) for r in (1, 2)]
    assert all("dsinks" in [quantity["name"] for quantity in each["quantities"]] for each in written["results"])
    assert written["swept"] == "length" and (tmp_path / "s.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "patience", "words"),
    [
        ("raises_on_rank_1", "60", "on rank 1 of 2 (the others did not) parity_tests.support.planted:raises_on_rank_1 failed: "
                                   "RuntimeError: this rank has had enough"),
        pytest.param("hangs_on_rank_1", "10", "in hangs_on_rank_1)", marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_a_users_function_that_fails_ends_everything_in_words(function: str, patience: str, words: str):
    before, began = active_children(), time.monotonic()
    done = ring_attn(f"{PLANTED}:{function}", "--framework", "torch", "--length", "64", "--patience", patience)
    assert done.exit_code == 2 and words in " ".join(done.output.split()), done.output
    assert "starting PyTorch" in done.output  # what is at work, where no terminal shows it for a moment
    assert set(active_children()) <= set(before)
    assert time.monotonic() - began < 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name what to compare: ring, layer,"),
        (("rign",), "unknown variant 'rign' (did you mean ring?): choose ring, layer,"),
        (("flash",), "flash in PyTorch: its kernels run on NVIDIA GPUs: pass --device gpu where there is one"),
        (("ring", "--backend", "triton"), "backend='triton' cannot run this: its kernels run on NVIDIA GPUs"),
        (("ring", "--heads", "3"), "q has 3 heads and k has 2: kv heads must divide query heads"),
        (("ring", "--ranks", "0"), "a ring needs at least 1 rank, got 0"),
        (("ring", "--patience", "inf"), "--patience is in seconds, more than 0 and finite, got inf"),
        (("ring", "--ranks", "two"), "--ranks takes numbers with commas between them, got 'two'"),
        (("ring", "--length", ""), "length has no value"),
        (("ring", "--seed", "-1"), "seed must be at least 0, got -1"),
        (("ring", "--layout", "spiral"), "unknown layout 'spiral': choose one of contiguous"),
        (("ring", "--dtype", "int8"), "unknown dtype 'int8'"),
        (("ring", "--mask", "window:-1"), "cannot read the mask 'window:-1'"),
        (("ring", "--framework", "numpy"), "unknown framework 'numpy': choose jax, torch"),
        (("sdpa", "--framework", "jax"), "sdpa in JAX: it is there in PyTorch only"),
        (("sdpa", "--softcap", "2"), "it does not take softcap"),
        (("ring-flash-attn",), "ring-flash-attn in PyTorch: not installed: run pip install ring-flash-attn"),
        (("torch-context-parallel",), "torch-context-parallel in PyTorch: its kernels run on NVIDIA GPUs"),
        (("mymodule:",), "cannot read 'mymodule:': write module:function"),
        (("torch:mymodule",), "cannot read 'torch:mymodule': write module:function"),
        (("ring", "--png", "picture.jpg"), "a comparison is drawn as .png or .svg"),
        (("ring", "--json", "no/such/folder/x.json"), "there is no folder no/such/folder"),
        (("ring", "--json", "."), ". is a folder: name a file in it"),
        (("dilated", "--segments", "128,64"), "dilated in JAX: segments must be at least 1 token long and strictly increasing"),
        (("summary", "--summaries", "0"), "summary in JAX: summaries must be an int of at least 1"),
        (("ring", "--repeats", "0"), "--repeats counts runs that are timed"),
        (("ring", "--bibtex"), "--bibtex is gone: pass --json FILE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_answered_in_one_line_before_anything_starts(arguments: tuple[str, ...], words: str):
    if arguments[:1] == ("ring-flash-attn",):
        from importlib.util import find_spec

        if find_spec("ring_flash_attn"):
            pytest.skip("it is installed")
    done = ring_attn(*arguments)
    assert done.exit_code == 2, done.output
    assert words in done.output and "Traceback" not in done.output


def test_files_that_cannot_be_written_are_refused_from_python_before_anything_starts():
    with (
        pytest.raises(ValueError, match=r"drawn as \.png or \.svg"),
        patch.object(comparison, "compare", side_effect=AssertionError),
    ):
        compare.run("ring", png="picture.jpg")


def test_a_file_in_place_of_a_module_and_an_array_without_a_gradient_are_named():
    with pytest.raises(ValueError, match=r"math.py:f names a file: write the module's name, math:f"):
        user.load("math.py:f")
    x = np.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="m:f returned out as a numpy array, which has no gradient"):
        user.call(lambda q, k, v: q, "m:f", dict.fromkeys("qkv", x), {})


def ring_attn(*arguments: str):
    return CliRunner().invoke(app, ["compare", *arguments])
