"""``ring-attn generate`` takes its prompt from a file or the command line, and shows no terminal what would steer it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ring_attn_cli.generate import run
from ring_attn_cli.generate.settings import GenerateSettings
from ring_attn_cli.generate.text import Text
from ring_attn_cli.main import app

STEERING = "a\x1b]0;title\x07b\x9b2J\rc\x7f\u202e\n\td é €"
SHOWN = "a\\x1b]0;title\\x07b\\x9b2J\\rc\\x7f\\u202e\n\td é €"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab": 256}))
    return tmp_path


@pytest.mark.parametrize(("terminal", "expected"), [(True, SHOWN), (False, STEERING)], ids=["terminal", "pipe"])
def test_a_terminal_is_shown_control_characters_as_escapes_and_a_pipe_gets_them(
    weights: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, expected: str
):
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", out)
    with run.GenerateWatch(Text(GenerateSettings(weights=weights, prompt="x")), Console(file=io.StringIO())) as watch:
        for token in STEERING.encode():
            watch("token", token)
    assert out.getvalue() == expected + "\n"


def test_a_prompt_of_the_command_line_is_its_bytes(weights: Path):
    assert Text(GenerateSettings(weights=weights, prompt="é\n")).ids == [0xC3, 0xA9, 0x0A]


def generate(weights: Path, *options: str):
    return CliRunner().invoke(app, ["generate", "--weights", str(weights), *options])


def test_one_prompt_is_wanted(weights: Path):
    (weights / "p.txt").write_text("x")
    file = "--prompt-file", str(weights / "p.txt")
    cases = {
        (): "pass what the text begins with: --prompt TEXT, or --prompt-file FILE",
        ("--prompt", "x", *file): "--prompt and --prompt-file were both passed: leave one of them out",
        ("--prompt", ""): "--prompt is empty: pass what the text begins with",
        ("--prompt", "a\udcff"): "--prompt is not UTF-8 text",
        ("--prompt", "x", "--stop", "300"): "--stop holds 300, and a vocabulary of 256 has 0 to 255",
    }
    for options, words in cases.items():
        done = generate(weights, *options)
        assert done.exit_code == 2 and done.stderr.startswith(f"ring-attn: {words}"), done.stderr


def test_the_command_runs_as_a_module_and_says_its_version():
    done = subprocess.run([sys.executable, "-m", "ring_attn_cli", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout[0].isdigit(), done.stderr
