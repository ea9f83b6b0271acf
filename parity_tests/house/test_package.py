"""Tests of packaging: the sdist and the wheel hold what they should, and the wheel works without a checkout and extras."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from .. import release
from ..support.programs import ROOT


def run(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of an environment of its own, without this checkout and without this machine's settings of pip."""
    variables = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null"}
    return subprocess.run([*map(str, command)], cwd=folder, env=variables, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> tuple[tarfile.TarFile, zipfile.ZipFile, Path]:
    for package in ("build", "hatchling"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return tarfile.open(sdist), zipfile.ZipFile(wheel), wheel


@pytest.mark.exhaustive
def test_both_archives_hold_the_licence_and_the_readme(dist):
    sdist, wheel, path = dist
    root, info = path.name.removesuffix("-py3-none-any.whl"), path.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    licence = (ROOT / "LICENSE").read_bytes()
    assert sdist.extractfile(f"{root}/LICENSE").read() == licence
    assert wheel.read(f"{info}/licenses/LICENSE") == licence
    for text in (sdist.extractfile(f"{root}/PKG-INFO").read(), wheel.read(f"{info}/METADATA")):
        fields = message_from_string(text.decode())
        assert fields["License-Expression"] == "MIT"
        assert fields["Description-Content-Type"] == "text/markdown"
        assert str(fields.get_payload()).strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
        assert not [line for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line]


@pytest.mark.exhaustive
def test_the_metadata_are_what_an_index_takes(dist):
    metadata = pytest.importorskip("packaging.metadata")
    _, wheel, path = dist
    text = wheel.read(path.name.removesuffix("-py3-none-any.whl") + ".dist-info/METADATA").decode()
    known = text.replace("Metadata-Version: 2.5", "Metadata-Version: 2.4")  # an older packaging refuses the number alone
    fields = metadata.Metadata.from_email(known, validate=True)
    assert str(fields.version) == release.version_of()
    assert not [requirement for requirement in fields.requires_dist or () if requirement.url]


def test_a_tag_needs_its_version_and_a_section_of_the_changelog(tmp_path: Path):
    (tmp_path / "ring_attn_core").mkdir()
    (tmp_path / "ring_attn_core" / "__init__.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n- A.\n\n## [0.2.0]\n\n- B.\n\n## [0.1.0]\n\n- C.\n")
    assert release.notes_of("v0.2.0", tmp_path) == "- B.\n"
    with pytest.raises(ValueError, match=r"the tag is v0.3.0 and the version 0.2.0"):
        release.notes_of("v0.3.0", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n- A.\n")
    with pytest.raises(ValueError, match=r"no section \[0.2.0\]"):
        release.notes_of("v0.2.0", tmp_path)
    assert "- `RingPlan`" in release.notes_of(f"v{release.version_of()}") or release.version_of() != "0.1.0"


def test_the_lists_of_what_extras_bring_are_pins_of_what_they_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    paths = list((ROOT / "requirements" / "extras").glob("*.txt"))
    assert {path.stem for path in paths} == {*project} - {"dev", "docs"}  # which have lock files in requirements/
    for path in paths:
        pins = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        assert [line for line in pins if not re.fullmatch(r"[\w.-]+==[\w.+]+", line)] == []
        named = {re.split(r"[>\[]", line)[0] for line in project[path.stem]} - {"ring-attn"}
        assert named <= {line.split("==")[0].lower() for line in pins}


@pytest.mark.exhaustive
def test_the_sdist_holds_what_its_tests_need(dist):
    sdist, *_ = dist
    there = {name.split("/")[1] for name in sdist.getnames() if "/" in name}
    assert {"parity_tests", "docs", "examples", "benchmarks", "requirements", "Makefile", "mkdocs.yml", "README.md"} <= there


@pytest.fixture(scope="module")
def empty(dist, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel alone."""
    folder = tmp_path_factory.mktemp("empty")
    for command in (
        (sys.executable, "-m", "venv", folder / "env"),
        (folder / "env" / "bin" / "python", "-m", "pip", "install", "--no-index", dist[2]),
    ):
        done = run(*command, folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "env" / "bin"


@pytest.mark.exhaustive
def test_the_core_works_from_the_wheel_alone(empty: Path, tmp_path: Path):
    program = "from ring_attn_core import RingPlan, causal; print(RingPlan('zigzag', causal(), 4, 4).balance)"
    assert run(empty / "python", "-c", program, folder=tmp_path).stdout == "1.0\n"


@pytest.mark.exhaustive
@pytest.mark.parametrize("package", ["jax", "torch"])
def test_a_package_without_its_framework_names_the_extra(empty: Path, tmp_path: Path, package: str):
    done = run(empty / "python", "-c", f"import ring_attn_{package}", folder=tmp_path)
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: ring_attn_{package} needs {package}: run pip install 'ring-attn[{package}]'"
    )


@pytest.mark.exhaustive
def test_the_package_for_hugging_face_names_its_extra(tmp_path: Path):
    pytest.importorskip("torch")
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.modules['transformers'] = None; import ring_attn_torch.transformers"
    )
    assert run(sys.executable, "-P", "-c", program, folder=tmp_path).stderr.splitlines()[-1] == (
        "ModuleNotFoundError: ring_attn_torch.transformers needs transformers: run pip install 'ring-attn[transformers]'"
    )


@pytest.mark.exhaustive
def test_the_command_names_its_extra(empty: Path, tmp_path: Path):
    done = run(empty / "ring-attn", "plan", folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr == 'ring-attn: typer is not installed: run pip install "ring-attn[demo]"\n'
