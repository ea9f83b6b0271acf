"""The command ``ring-attn``: what it prints, and how it answers a mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ring_attn_cli.main import app, make_plan
from ring_attn_cli.output_files import check_writable
from ring_attn_core.layouts import LAYOUTS

ROOT = Path(__file__).resolve().parents[2]


def plan(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_plan_draws_the_plan_that_was_asked_for():
    done = plan("--layout", "striped", "--mask", "sliding_window:9", "--ranks", "3", "--length", "31")
    assert done.exit_code == 0, done.output
    assert "striped layout, window of 9 before and 0 after, 3 ranks, 31 tokens" in done.output
    assert "balance" in done.output


def test_save_writes_the_picture(tmp_path: Path):
    done = plan("--ranks", "2", "--length", "9", "--save", str(tmp_path / "plan.svg"))
    assert done.exit_code == 0, done.output
    assert f"wrote {tmp_path / 'plan.svg'}" in done.output
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_a_picture_that_cannot_be_written_is_refused_before_the_plan_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("ring_attn_cli.main.make_plan", lambda *arguments: pytest.fail("the plan was made"))
    done = plan("--save", str(tmp_path / "none" / "plan.svg"))
    assert done.exit_code == 2 and "none for plan.svg: make it first" in done.stderr, done.output
    done = plan("--save", str(tmp_path / "plan.jpg"))
    assert done.exit_code == 2 and "end the file name in .svg" in done.stderr, done.output
    assert not list(tmp_path.iterdir())


MISTAKES: dict[str, list[tuple[list[str], str]]] = {
    "plan --length 16 --ranks 2": [
        (["--layout", "spiral"], "unknown layout 'spiral': choose one of contiguous"),
        (["--mask", "causual"], "cannot read the mask 'causual': write full, "),
        (["--ranks", "99999999999"], "a plan of 99999999999 ranks is too large to draw"),
        (["--ranks", "0"], "a ring needs at least 1 rank, got 0"),
        (["--length", "-5"], "length is the true global number of tokens, an int of at least 0 (static under jit), got -5"),
        (["--save", "plan.jpg"], "a plan is drawn as .svg, no longer as .png, got 'plan.jpg'"),
        (["--save", "no/such/folder/plan.svg"], "there is no folder no/such/folder for plan.svg: make it first"),
        (["--all-layouts"], "--all-layouts is gone: pass --documents with the length, which compares all layouts"),
        (["--kv-length", "9"], "--kv-length is gone: RingPlan(kv_length=...) plans cross-attention in Python"),
        (
            ["--heads", "32/8", "--memory", "8"],
            "a drawn plan has no sizes of a model (pass --model or --gpus): leave out --heads, --memory",
        ),
        (["--model", "llama-8b"], "--model alone says what fits into memory: leave out --ranks, --length"),
    ],
    "plan": [
        (["--gpus", "1"], "--gpus must be 2 to 4096, got 1"),
        (["--gpus", "0"], "--gpus must be 2 to 4096, got 0"),
        (["--gpus", "5000"], "--gpus must be 2 to 4096, got 5000"),
        (["--gpus", "4", "--host-gpus", "0"], "--host-gpus must be at least 1, got 0"),
        (["--gpus", "4", "--heads", "x"], "--heads must be query heads, or query and key heads, such as 32/8, got 'x'"),
        (["--gpus", "4", "--heads", "5/2"], "kv heads must divide query heads"),
        (["--gpus", "4", "--ranks", "4", "--save", "a.svg"], "leave out --ranks, --save"),
        (["--gpus", "4", "--ranks", "0"], "leave out --ranks"),
        (["--machine", "H200", "--model", "llama-8b", "--tokens", "9"], "leave out --tokens"),
        (["--machine", "H200", "--model", "llama-8b", "--heads", "4"], "--model gives the heads and their size: leave out"),
        (["--machine", "H200", "--model", "llama-9b"], "llama-9b"),
        (["--machine", "ours.json"], "'ours.json' is not one of H200, H100, of which measurements are built in; a file"),
        (["--model", "gpt-9"], "no model is called 'gpt-9': choose one of llama-1b, llama-8b, "),
        (["--model", "no/such/config.json"], "no/such/config.json is missing"),
        (["--model", "llama-8b", "--memory", "8"], "llama-8b fits no 1,024 tokens a GPU: one token takes"),
        (["--model", "llama-8b", "--memory", "-1"], "--memory must be a number of GiB above 0, got -1"),
        (["--model", "llama-8b", "--activations", "drop"], "activations must be one of keep, recompute, offload, got 'drop'"),
        (["--model", "llama-8b", "--tokens", "0"], "tokens must be an int of at least 1, got 0"),
        (["--model", "llama-8b", "--tokens", "-4"], "tokens must be an int of at least 1, got -4"),
        (["--model", "llama-8b", "--tokens", f"1{30 * '0'}"], "tokens must be at most 2147483647, got 1000"),
        (["--documents", "4,x"], "--documents takes lengths in tokens such as 4096,512,1024, or a file of them, got '4,x'"),
        (["--documents", ""], "--documents takes lengths of at least 1 token such as 4096,512,1024, got ''"),
        (["--documents", "99999999999999999999,2"], "--documents draws at most 10,000 segments or documents of 16,777,216"),
        (["--documents", sys.executable], "--documents takes a file of numbers in UTF-8"),
        (["--documents", "4,0"], "--documents takes lengths of at least 1 token such as 4096,512,1024, got '4,0'"),
        (["--documents", "4", "--layout", "spiral"], "unknown layout 'spiral'"),
        (["--documents", "4", "--length", "8", "--save", "a.svg"], "leave out --length, --save"),
        (["--documents", "4", "--ranks", "4097"], "a plan of 4097 ranks is too large to draw"),
        (["--layout", "balanced"], "the layout balanced follows from documents or a tree: pass --documents or --tree with"),
        (["--tree", "8,y"], "--tree takes the tokens of a prompt and of its completions such as 4096,512x8"),
        (["--tree", "8,0"], "row 0, segment 1 has 0 tokens"),
        (["--tree", "8,1:4"], "row 0, segment 1 has the parent 1: a parent comes before its children"),
        (["--tree", ""], "or a file of them, got ''"),
        (["--tree", "8x"], "or a file of them, got '8x'"),
        (["--tree", "8,4x-1"], "or a file of them, got '8,4x-1'"),
        (["--tree", "8,4x999999999"], "16,777,216 tokens in all, got 1,000,000,000 of 4,000,000,004 tokens: pass fewer"),
        (["--tree", sys.executable], "--tree takes a file of numbers in UTF-8"),
        (["--tree", "8,4", "--layout", "spiral"], "unknown layout 'spiral'"),
        (["--tree", "8,4", "--mask", "full", "--length", "8"], "--tree gives the length and compares all layouts: leave out"),
        (["--tree", "8,4", "--documents", "8"], "--documents gives the length and compares all layouts: leave out --tree"),
    ],
    "doctor": [
        (["--dtype", "bf16"], "q, k and v must be one of bfloat16, float16, float32, float64, got bf16"),
        (["--head-dim", "0"], "head_dim must be at least 1, got 0"),
        (["--v-dim", "-1"], "v_dim must be at least 1, got -1"),
        (["--framework", "numpy"], "unknown framework 'numpy': choose one of both, torch, jax"),
        (["--measure"], 'strategy="auto" no longer reads measurements, and ring-attn plan --gpus takes its numbers from'),
        (["--model", "X"], "--model is gone: in a clone of the repository run python -m benchmarks.hugging_face.tested_models"),
    ],
}
CASES = [([*command.split(), *given], message) for command, rows in MISTAKES.items() for given, message in rows]


@pytest.mark.parametrize(("arguments", "message"), CASES, ids=[" ".join(arguments) for arguments, _ in CASES])
def test_a_mistake_is_answered_in_one_line_and_exit_status_2(arguments: list[str], message: str):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.startswith("ring-attn: ")
    assert done.stderr.count("\n") == 1


def test_a_length_of_any_size_is_drawn():
    done = plan("--ranks", "2", "--length", str(2**63 - 1))
    assert done.exit_code == 0 and "2e37" in done.output, done.output


@pytest.mark.parametrize("command", ["generate", "demo", "compare", "train"])
def test_more_ranks_than_a_machine_runs_are_refused_before_any_is_started(command: str, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "run.toml").write_text(
        f'out = "{tmp_path}/run"\n[data]\nlength = 99998\nbatch_size = 1\nfolder = "{tmp_path}"\npattern = "a"\nheld_out = "a"\n'
        '[ring]\nlayout = "contiguous"\n[passkey]\nlengths = []\n'
    )
    (tmp_path / "a").write_text("a" * 3 * 99998)
    pytest.importorskip("torch")
    options = {
        "generate": ["--weights", str(tmp_path), "--prompt", "x"],
        "demo": ["--tokens", "999999", "--out", str(tmp_path)],
        "compare": ["ring", "--framework", "torch"],
        "train": [str(tmp_path / "run.toml")],
    }
    done = CliRunner().invoke(app, [command, *options[command], "--ranks", "49999"])
    assert done.exit_code == 2 and "ranks are more than one machine runs: pass at most 1024" in done.stderr, done.output


def test_a_lack_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("ring_attn_cli.main.make_plan", full)
    done = plan()
    assert done.exit_code == 2 and done.stderr == "ring-attn: there is not enough memory for this: ask for fewer tokens\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_package_is_answered_with_the_extra_that_brings_it(missing: str):
    code = f"import sys; sys.modules[{missing!r}] = None; from ring_attn_cli.main import main; main()"
    command = [sys.executable, "-c", code, "plan", "--ranks", "2", "--length", "8"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert ran.stderr == f'ring-attn: {missing} is not installed: run pip install "ring-attn[demo]"\n'


def test_a_missing_reader_of_data_is_answered_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "config.toml").write_text(f"[data]\nfolder = '{tmp_path}'\npattern = 'a.parquet'\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    ran = CliRunner().invoke(app, ["train", str(tmp_path / "config.toml"), "--out", str(tmp_path / "run")])
    assert (ran.exit_code, ran.stderr) == (2, 'ring-attn: pyarrow is not installed: run pip install "ring-attn[data]"\n')


@pytest.mark.parametrize("rich", ["exits at a broken pipe", "raises at a broken pipe"])
def test_a_reader_that_stops_early_causes_no_message(rich: str):
    code = "import sys; from rich.console import Console; from ring_attn_cli.main import main\n"
    code += "Console._check_buffer = Console._write_buffer\n" if rich.startswith("raises") else ""  # as before rich 13.8
    command = [sys.executable, "-c", f"{code}sys.stdin.read(); main()", "plan", "--ranks", "2", "--length", "64"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdin and process.stderr
    process.stdout.close()  # before anything is written
    process.stdin.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1


@pytest.mark.slow
def test_the_plan_is_as_wide_as_columns_says_and_80_where_no_terminal_is():
    widths = {}
    for columns in (None, "60"):
        environment = {name: x for name, x in os.environ.items() if name != "COLUMNS"} | ({"COLUMNS": columns} if columns else {})
        command = [sys.executable, "-m", "ring_attn_cli.main", "plan"]
        shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
        assert "…" not in shown
        widths[columns] = max(map(len, shown.splitlines()))
    assert widths["60"] <= 60 < widths[None] <= 80


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_is_made_with_the_least_padding(layout: str, ranks: int):
    made = make_plan(layout, "causal", ranks, 37)
    assert made.length == made.kv_length == 37
    assert 0 <= made.seq_local * ranks - 37 < 2 * ranks


def test_a_folder_that_cannot_be_made_is_named_with_the_option_that_says_it(tmp_path: Path):
    pytest.importorskip("torch")
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "file" / "run")])
    assert done.exit_code == 2, done.output
    assert "file/run' cannot be written (Not a directory): pass another --out FOLDER" in done.stderr


def test_files_that_cannot_be_written_are_refused_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    started = lambda *arguments, **named: pytest.fail("it has started")
    monkeypatch.setattr("ring_attn_cli.compare.comparison.Pool", started)
    monkeypatch.setattr("ring_attn_cli.demo.run.compute", started)
    (tmp_path / "file").write_text("")
    named = str(tmp_path / "link.png")
    Path(named).symlink_to(tmp_path / "no" / "folder.png")
    done = CliRunner().invoke(app, ["compare", "ring", "--framework", "torch", "--json", named])
    assert done.exit_code == 2 and "cannot be written (No such file or directory)" in done.stderr, done.output
    kept = tmp_path / "kept.json"
    done = CliRunner().invoke(app, ["compare", "ring", "--framework", "torch", "--json", str(kept), "--png", named])
    assert done.exit_code == 2 and not kept.exists()
    done = CliRunner().invoke(app, ["demo", "--quick", "--framework", "torch", "--out", str(tmp_path / "file")])
    assert done.exit_code == 2 and "file cannot be made a folder (File exists): pass another --out" in done.stderr, done.output


def test_the_number_of_a_closed_stdout_is_taken_by_nothing_else():
    code = """
import os, sys
import ring_attn_cli.main as command
def app(prog_name):
    print("nothing is lost", os.open(os.devnull, os.O_RDONLY), file=sys.stderr)
    sys.stdout.write("x")
command.app = app
command.main()
"""
    shell = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, code]
    done = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr.startswith("nothing is lost ") and int(done.stderr.split()[-1]) > 2, done.stderr


def test_the_check_of_an_output_file_leaves_the_folder_as_it_was(tmp_path: Path):
    (tmp_path / "there").write_text("kept")
    (tmp_path / "link").symlink_to("aim")
    for name in ("new", "there", "link"):
        check_writable(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]
    assert (tmp_path / "there").read_text() == "kept" and (tmp_path / "link").is_symlink()
