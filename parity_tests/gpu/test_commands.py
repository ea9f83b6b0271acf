"""Tests of the programs, examples and commands of ring-attn in README and docs/, run on a machine with a GPU.

A program runs as it stands, and those of PyTorch a second time on the GPU, changed as their comments say: NCCL for gloo.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ring_attn_cli.train.loop import lines

from ..support import corpus
from ..support.programs import PROGRAMS, RING_TRAINER, ROOT, environment, run, skip_without_its_packages, started

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.filterwarnings("ignore")]
GPUS = torch.cuda.device_count()
COMMAND = ["-m", "ring_attn_cli.main"]
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""The tests of several workers, and a process of each framework in one command, share a GPU."""
EXAMPLES = {"jax_train.py": (), "torch_train.py": (), "jax_train_lm.py": ("10",), "torch_train_lm.py": ("10",)}
ON_GPU = {name: text for name, text in PROGRAMS.items() if 'init_process_group("gloo")' in text or "use_cpu=True" in text}
LEFT_OUT = {
    "torch_tensor_parallel.py": "its mesh needs two processes, each with a GPU of its own",
    "torch_dataset.py": "its batches are on the CPU",
    "torch_batches.py": "its batches are on the CPU",
    "torch_hugging_face_rings.py": "its two rings need two processes, each with a GPU of its own",
}
TRAIN = """
steps = 6
save_every = 2
[model]
dim = 128
depth = 2
heads = 2
kv_heads = 1
compute_dtype = "bfloat16"
[data]
folder = "texts"
pattern = "**/*.txt"
held_out = "**/*.txt"
length = 256
batch_size = 2
[ring]
ranks = 1
[evaluation]
every = 3
batches = 1
[passkey]
lengths = [128]
texts = 2
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_docs_runs_as_it_stands_beside_a_gpu(name, tmp_path):
    (tmp_path / name).write_text(PROGRAMS[name])
    skip_without_its_packages(PROGRAMS[name])
    assert run(name, name.split("_")[0], tmp_path, processes=2, variables=SHARED).strip(), "it prints nothing"


@pytest.mark.parametrize("name", ON_GPU)
def test_a_program_of_pytorch_runs_on_the_gpus(name, tmp_path):
    text = ON_GPU[name]
    skip_without_its_packages(text)
    if name in LEFT_OUT and (GPUS < 2 or "CPU" in LEFT_OUT[name]):
        pytest.skip(LEFT_OUT[name])
    moved = text.replace('"gloo"', '"nccl"').replace('mesh("cpu"', 'mesh("cuda"').replace("use_cpu=True", "use_cpu=False")
    device = "import os, torch\ntorch.cuda.set_device(int(os.environ['LOCAL_RANK']))\ntorch.set_default_device('cuda')\n"
    (tmp_path / name).write_text(moved if "RingTrainer" in text else device + moved)
    run(name, "torch", tmp_path, processes=min(GPUS, 2))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns_beside_a_gpu(name, tmp_path):
    framework = name.split("_")[0]
    done = run(str(ROOT / "examples" / name), framework, tmp_path, arguments=EXAMPLES[name], variables=SHARED)
    first, *_, last = (float(value) for value in re.findall(r"loss ([\d.]+)", done))
    assert last < first - 0.5


def test_fine_tuning_runs_on_the_gpus(tmp_path):
    pytest.importorskip("transformers", minversion=RING_TRAINER)
    done = run(str(ROOT / "examples" / "hf_finetune.py"), "torch", tmp_path, processes=GPUS)
    first, *_, last = (float(value) for value in re.findall(r"loss ([\d.]+)", done))
    assert last < first


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with ``config.toml`` and the texts that it names."""
    folder = tmp_path_factory.mktemp("train")
    corpus.write_texts(folder / "texts", (700, 61, 1, 900, 100, 3, 1300))
    (folder / "config.toml").write_text(TRAIN)
    return folder


@pytest.fixture(scope="module", params=["torch", "jax"])
def trained(request, texts):
    """A framework, the folder of texts, and the folder of a run that nothing interrupted."""
    out = texts / f"whole-{request.param}"
    print(started(train(request.param, out), texts, SHARED))
    return request.param, texts, out


def train(framework: str, out: Path) -> list[str]:
    return [*COMMAND, "train", "config.toml", "--framework", framework, "--out", str(out)]


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(out / "log.jsonl") if line["kind"] == "step"}


def test_training_runs_on_the_gpu_with_checkpoints_and_weights(trained):
    framework, _, out = trained
    assert list(losses(out)) == list(range(1, 7))
    machine = next(line for line in lines(out / "log.jsonl") if "device" in json.dumps(line))
    assert torch.cuda.get_device_name().split()[-1].lower() in json.dumps(machine).lower()
    assert {path.name for path in (out / "checkpoints").iterdir()} >= {"step-000000006" if framework == "torch" else "step_6"}
    assert (out / "weights" / "model.safetensors").exists()
    assert (out / "train.png").exists()


def test_training_that_is_killed_goes_on_from_its_checkpoint(trained):
    framework, folder, whole = trained
    out = folder / f"killed-{framework}"
    command = [sys.executable, *train(framework, out)]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(SHARED), start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + 200
    while not any((out / "checkpoints").glob("step[-_]*2")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    said = process.communicate()[0].decode()
    assert any((out / "checkpoints").glob("step[-_]*2")), said
    done = started(train(framework, out), folder, SHARED)
    assert losses(out) == pytest.approx(losses(whole), rel=1e-3), done


def test_training_under_torchrun_takes_the_gpu(texts):
    out = texts / "torchrun"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    started([*launch, *train("torch", out)], texts)
    assert list(losses(out)) == list(range(1, 7))


def test_trained_weights_generate_in_either_framework(trained):
    _, folder, out = trained
    (folder / "prompt.txt").write_text("def main(")
    command = [*COMMAND, "generate", "--weights", str(out / "weights"), "--prompt-file", "prompt.txt", "--max-new-tokens", "16"]
    for framework in ("torch", "jax"):
        assert started([*command, "--framework", framework], folder, SHARED)


@pytest.mark.parametrize(
    ("framework", "arguments"),
    [
        ("jax,torch", ["ring", "--device", "gpu", "--dtype", "bfloat16", "--length", "2048", "--head-dim", "64", "--sinks"]),
        ("torch", ["flash", "cudnn", "--device", "gpu", "--dtype", "bfloat16", "--length", "2048", "--head-dim", "64"]),
        ("jax,torch", ["dilated", "summary", "--device", "gpu", "--length", "1024", "--head-dim", "64"]),
        ("jax,torch", ["layer", "transformer", "--device", "gpu"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_compare_keeps_every_bound_on_the_gpu(framework, arguments, tmp_path):
    written = ["--ranks", "1", "--repeats", "2", "--json", "found.json", "--png", "found.png"]
    said = started([*COMMAND, "compare", *arguments, "--framework", framework, *written], tmp_path, SHARED)
    assert json.loads((tmp_path / "found.json").read_text()), said


def test_compare_runs_on_the_cpu_beside_a_gpu(tmp_path):
    assert started([*COMMAND, "compare", "ring", "--length", "128", "--repeats", "1"], tmp_path, SHARED)


def test_doctor_finds_the_gpu_in_both_frameworks(tmp_path):
    said = started([*COMMAND, "doctor"], tmp_path, SHARED | {"COLUMNS": "200"})
    assert said.count(torch.cuda.get_device_name()) >= 2 or said.lower().count("cuda") >= 2, said
    assert "hopper" in said


@pytest.mark.parametrize(
    "arguments",
    [["--layout", "zigzag", "--ranks", "8", "--length", "8192", "--save", "plan.svg"], ["--model", "llama-8b", "--gpus", "8"]],
    ids=["picture", "memory"],
)
def test_plan_answers(arguments, tmp_path):
    assert started([*COMMAND, "plan", *arguments], tmp_path)


def test_the_demo_passes_beside_a_gpu(tmp_path):
    assert started([*COMMAND, "demo", "--quick"], tmp_path, SHARED)
    assert (tmp_path / "demo-output" / "demo.json").exists()
