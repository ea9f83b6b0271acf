"""README and docs/ tell the truth: programs run as they stand, commands and links exist, the features are what tests prove."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ..support import warm
from ..support.programs import BLOCK, PAGES, PROGRAM, PROGRAMS, README, ROOT, environment, skip_without_its_packages

SCREENS = 130
"""The most lines that README.md may have: some three screens."""

REPEATED = (
    *("jax_natural_order.py", "jax_functional.py", "jax_memory.py", "jax_accumulation.py", "jax_dilated_attention_fn.py"),
    *("jax_sharded_weights.py", "jax_decode_step.py", "jax_export.py", "torch_compare.py"),
)
"""Programs that run with ``--full`` only: others of the docs and tests of the package make the same calls, and XLA takes long."""


def of_the_docs() -> list[Any]:
    """Return the names of programs that are not quick starts, as a test's parameters."""
    marks = {True: pytest.mark.full, False: pytest.mark.exhaustive}
    return [pytest.param(name, marks=marks[name in REPEATED]) for name in PROGRAMS if "quickstart" not in name]


def test_every_program_that_is_repeated_exists():
    assert {*REPEATED} <= {*PROGRAMS}


def test_the_first_screen_has_a_picture_and_two_commands():
    first = README.read_text().splitlines()[:40]
    assert any(line.startswith("![") for line in first)
    assert "make demo" in "\n".join(first)
    assert "make test" in "\n".join(first)


def test_the_readme_has_three_screens():
    assert len(README.read_text().splitlines()) <= SCREENS


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_is_a_program_that_is_run(page):
    """Its first line is a comment with a name of its own, which begins with the framework."""
    for block in BLOCK.findall(PAGES[page]):
        named = PROGRAM.match(block)
        assert named, f"no name such as '# torch_example.py' on top of:\n{block}"
        assert PROGRAMS[named[1]] == named[3], f"two programs are called {named[1]}"


@pytest.mark.parametrize("name", ["jax_quickstart.py", "torch_quickstart.py"])
def test_a_quick_start_runs_as_it_stands_in_at_most_20_lines(name, tmp_path):
    assert len(PROGRAMS[name].strip().splitlines()) <= 20
    framework = name.split("_")[0]
    pytest.importorskip(framework)
    (tmp_path / name).write_text(PROGRAMS[name])
    assert "1000" in run_warm([name], framework, tmp_path, processes=2)


@pytest.mark.parametrize("name", of_the_docs())
def test_a_program_of_the_docs_runs_as_it_stands(name, tmp_path):
    if name == "jax_export.py":
        gpu_triton = pytest.importorskip("jaxlib.gpu_triton")
        if not hasattr(gpu_triton, "create_array_parameter"):
            pytest.skip("needs jaxlib's plugin: pip install --no-deps jax-cuda12-plugin")
        pytest.importorskip("triton")
    skip_without_its_packages(PROGRAMS[name])
    framework = name.split("_")[0]
    pytest.importorskip(framework)
    (tmp_path / name).write_text(PROGRAMS[name])
    assert run_warm([name], framework, tmp_path, processes=2).strip(), "it prints nothing"


def run_warm(arguments: list[str], framework: str, folder: Path = ROOT, processes: int = 4) -> str:
    """Run a program in processes that have made the imports: ``processes`` of PyTorch, or one of JAX with as many devices."""
    variables = environment({"XLA_FLAGS": warm.QUICK, "JAX_NUM_CPU_DEVICES": str(processes)})
    return warm.run(arguments, framework, folder, variables, processes if framework == "torch" else None)


@pytest.mark.parametrize(("framework", "processes", "ranks"), [("torch", 1, "01"), ("torch", 2, "02 12"), ("jax", 4, "None")])
def test_a_program_of_pytorch_is_told_its_rank_as_by_torchrun(framework, processes, ranks, tmp_path):
    """One process too: the default group of transformers' and trl's Trainers is made if it is told."""
    pytest.importorskip(framework)
    (tmp_path / "rank.py").write_text("import os; print(os.environ.get('RANK', 'None') + os.environ.get('WORLD_SIZE', ''))")
    assert " ".join(run_warm(["rank.py"], framework, tmp_path, processes).split()) == ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_an_example_trains(framework):
    """The last loss it prints is well below the first."""
    program = str(ROOT / "examples" / f"{framework}_train.py")
    pytest.importorskip(framework)
    done = run_warm([program], framework)
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", done)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1


@pytest.mark.exhaustive
def test_an_example_of_a_hybrid_model_trains():
    pytest.importorskip("jax")
    done = run_warm([str(ROOT / "examples" / "jax_hybrid.py")], "jax")
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", done)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.2


@pytest.mark.exhaustive
@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.full)])
def test_an_example_of_a_language_model_trains(framework, tmp_path):
    pytest.importorskip(framework)
    done = run_warm([str(ROOT / "examples" / f"{framework}_train_lm.py"), "10"], framework, tmp_path, 2)
    first, last = (float(value) for value in re.findall(r"loss ([\d.]+)", done))
    assert last < first - 0.5


@pytest.mark.exhaustive
def test_grpo_on_a_tree_is_grpo_on_its_rollouts_one_by_one():
    pytest.importorskip("torch")
    done = run_warm([str(ROOT / "examples" / "grpo_tree.py")], "torch", processes=2)
    found = re.findall(r"reward ([\d.]+), loss (\S+), one by one (\S+), gradients differ by (\S+),", done)
    rewards, losses, exact, errors = (list(map(float, column)) for column in zip(*found, strict=True))
    assert len(rewards) == 10
    assert rewards[-1] > rewards[0] + 0.2
    assert losses == pytest.approx(exact, abs=2e-5)
    assert max(errors) < 1e-5


@pytest.mark.exhaustive
def test_grpo_of_trl_learns_on_a_ring_as_on_one_process():
    pytest.importorskip("trl")
    program = str(ROOT / "examples" / "grpo_trl.py")
    one, two = (re.findall(r"[\d.]+", run_warm([program], "torch", processes=n).rpartition("rewards")[2]) for n in (1, 2))
    assert len(one) == 10
    assert one == two
    assert float(one[-1]) > float(one[0]) + 0.5


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_it_names_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", PAGES[page], re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]) if ":" not in link]
    assert links or page != "README.md"
    for link in links:
        path, _, heading = re.sub(r"\s", "", link).partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), link
        assert not heading or heading in headings(target.read_text()), link


def headings(page: str) -> set[str]:
    """The names by which a link reaches the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_table_of_features_is_what_the_tests_prove():
    pytest.importorskip("torch")
    from ..support.feature_table import PAGE, with_table

    page = PAGE.read_text()
    assert with_table(page) == page, "run python -m parity_tests.support.feature_table"
