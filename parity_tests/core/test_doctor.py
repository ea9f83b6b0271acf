"""``ring-attn doctor``: what it finds on a machine without a GPU, on one that pretends to have some, and on a broken one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from ring_attn_cli.doctor import BackendFitness, choices, findings, typical, versions
from ring_attn_cli.main import app
from ring_attn_core.kernels import backends
from ring_attn_core.kernels.backends import BACKENDS

GPUS, NAMES = 2, {"torch": "PyTorch", "jax": "JAX"}
Pretend = Callable[[str, int], None]
LESS_PRECISE = "never: it is less precise than its inputs"


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Let a framework report the capability of an NVIDIA GPU, or 0 for a machine without; Triton is installed."""

    def patch(framework: str, capability: int) -> None:
        pytest.importorskip(framework)
        monkeypatch.setattr("ring_attn_core.kernels.backends.broken_triton", lambda: None)
        monkeypatch.setattr("ring_attn_core.kernels.backends._has_flash4", lambda: False)
        monkeypatch.setattr(f"ring_attn_{framework}.attend.launch.capability", lambda *device: capability)
        if framework == "jax":
            monkeypatch.setattr("ring_attn_jax.attend.launch.makes_descriptors", lambda: True)
        if framework == "torch":
            monkeypatch.setattr("torch.cuda.is_available", lambda: capability > 0)
            monkeypatch.setattr("torch.cuda.device_count", lambda: GPUS)
            monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")

    return patch


def doctor(framework: str, *arguments: str) -> dict[str, list[str]]:
    """The cells of every row of the table, by backend; the rest of what is printed under ""."""
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["doctor", "--framework", framework, *arguments])
    assert done.exit_code == 0, done.output
    assert not done.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == [each.name for each in BACKENDS]
    return {name: rest for name, *rest in rows} | {"": [line for line in done.stdout.splitlines() if line[:1] not in "│┃┏┡└"]}


@pytest.fixture(autouse=True)
def measured_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton that the Hopper forward is measured with: under newer ones "auto" passes it over."""
    monkeypatch.setattr(backends, "triton_release", lambda: (3, 6))


@pytest.mark.parametrize("framework", NAMES)
def test_without_a_gpu_triton_says_why_not_and_auto_takes_blockwise(framework: str, pretend: Pretend):
    pretend(framework, 0)
    said = doctor(framework)
    assert said["triton"][0].startswith("its kernels run on NVIDIA GPUs, and these arrays are on ")
    assert said["triton"][1] == ""
    assert said["triton_tf32"] == [said["triton"][0], LESS_PRECISE]
    assert said["blockwise"] == ["runs", "takes it"]
    assert any(line.startswith(f"{NAMES[framework]}: ") for line in said[""])


@pytest.mark.parametrize("framework", NAMES)
def test_on_a_hopper_gpu_auto_takes_its_own_kernels(framework: str, pretend: Pretend):
    pretend(framework, 90)
    said = doctor(framework)
    assert said["hopper"] == ["runs", "takes it"]
    assert said["triton"] == ["runs", ""]
    assert said["blockwise"] == ["runs", ""]
    assert any("compute capability 9.0" in line for line in said[""])


def test_without_tma_descriptors_auto_takes_the_portable_kernels(pretend: Pretend, monkeypatch: pytest.MonkeyPatch):
    pretend("jax", 90)
    monkeypatch.setattr("ring_attn_jax.attend.launch.makes_descriptors", lambda: False)
    said = doctor("jax")
    assert said["hopper"][0].startswith("its kernels read by TMA descriptors, which this jaxlib cannot make")
    assert said["triton"] == ["runs", "takes it"]


def test_the_forward_and_the_backward_are_chosen_apart(monkeypatch):
    monkeypatch.setattr(backends, "triton_release", lambda: (3, 9))
    problem = replace(typical("bfloat16", 64, 64), device="cuda", capability=90)
    listed = {each.backend: each for each in choices(replace(problem, options=replace(problem.options, softcap=30.0)))}
    assert listed["hopper"].auto.startswith("takes the forward, not the backward: its backward of heads of 64 with softcap")
    assert listed["triton"].auto == "takes the backward"


def test_the_assembler_is_named():
    pytest.importorskip("triton")
    assert versions()["ptxas"].split(".")[0].isdecimal()


@pytest.mark.parametrize("framework", NAMES)
@pytest.mark.parametrize("capability", [80, 100])
def test_on_another_gpu_auto_takes_the_portable_kernels(framework: str, capability: int, pretend: Pretend):
    pretend(framework, capability)
    said = doctor(framework)
    assert said["hopper"] == [f"its kernels are for Hopper GPUs (sm_90), and this one is sm_{capability}", ""]
    assert said["triton"] == ["runs", "takes it"]


@pytest.mark.parametrize("framework", NAMES)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--dtype", "float32"), "its products are of bfloat16 and float16, not float32"),
        (("--head-dim", "100"), "it takes head sizes that 8 divides, of at most 256, and head_dim is 100"),
        (("--head-dim", "64", "--v-dim", "128"), "values may not be wider than keys, and v_dim is 128 of head_dim 64"),
    ],
    ids=("float32", "head_dim", "v_dim"),
)
def test_calls_that_hopper_kernels_cannot_run_fall_to_the_portable_ones(
    framework: str, arguments: tuple[str, ...], reason: str, pretend: Pretend
):
    pretend(framework, 90)
    said = doctor(framework, *arguments)
    assert said["hopper"] == [reason, ""]
    assert said["triton"] == ["runs", "takes it"]


@pytest.mark.parametrize("framework", NAMES)
def test_tf32_runs_in_float32_and_auto_never_takes_it(framework: str, pretend: Pretend):
    pretend(framework, 90)
    said = doctor(framework, "--dtype", "float32")
    assert said["triton_tf32"] == ["runs", LESS_PRECISE]
    assert said["triton"] == ["runs", "takes it"]


@pytest.mark.parametrize("framework", NAMES)
@pytest.mark.parametrize(
    ("capability", "arguments", "reason"),
    [
        (90, ("--dtype", "float64"), "its kernels take bfloat16, float16 and float32, not float64"),
        (90, ("--head-dim", "513", "--v-dim", "8"), "head_dim is 513"),
        (90, ("--v-dim", "520"), "v_dim is 520"),
        (75, (), "and this one is sm_75"),
    ],
    ids=("float64", "head_dim", "v_dim", "capability"),
)
def test_calls_that_the_kernels_cannot_run_fall_to_blockwise(
    framework: str, capability: int, arguments: tuple[str, ...], reason: str, pretend: Pretend
):
    pretend(framework, capability)
    said = doctor(framework, *arguments)
    assert reason in said["triton"][0] and said["triton"][1] == ""
    assert said["blockwise"] == ["runs", "takes it"]


def test_every_gpu_of_a_kind_is_counted(pretend: Pretend):
    pretend("torch", 90)
    (found,) = findings(typical("bfloat16", 128), "torch")
    gpus, kernels = found.words
    assert gpus == f"{GPUS} x a GPU, compute capability 9.0"
    assert "of the 7 kernels of this problem are compiled" in kernels


def test_choices_follow_the_order_of_auto():
    listed = choices(typical("float32", 64))
    assert [choice.backend for choice in listed] == [each.name for each in BACKENDS]
    assert listed[-1] == BackendFitness("blockwise", None, None, ("forward", "backward"))
    assert [choice.taken for choice in listed].count(()) == len(listed) - 1


@pytest.mark.parametrize("framework", NAMES)
def test_a_framework_that_is_not_installed_is_one_line(framework: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, framework, None)
    done = CliRunner().invoke(app, ["doctor", "--framework", framework])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == (f'{NAMES[framework]}: not installed: run pip install "ring-attn[{framework}]"')
    assert versions()[framework] == "not installed"


@pytest.mark.parametrize("framework", NAMES)
def test_a_framework_that_does_not_start_is_one_line(framework: str, monkeypatch: pytest.MonkeyPatch):
    def broken():
        raise OSError("libcudart.so: cannot open shared object file\nand more")

    pytest.importorskip(framework)
    monkeypatch.setattr(f"ring_attn_cli.doctor._{framework}", broken)
    (found,) = findings(typical("bfloat16", 128), framework)
    assert found.words == ("installed, but does not start: libcudart.so: cannot open shared object file",)
    assert found.choices == ()
