"""The records of measured machines: their files, and the ranks of each host."""

from __future__ import annotations

from pathlib import Path

import pytest

from ring_attn_core.plan.machine import H200
from ring_attn_core.plan.measured import host, path_of, ranks_of_a_host, save, stored


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


def test_a_record_is_found_by_its_framework_and_device(home: Path):
    assert stored("torch", H200.name) is None
    path = save(H200, "torch")
    assert path == home / ".cache" / "ring-attn" / "torch-NVIDIA-H200.json"
    assert stored("torch", H200.name) == H200
    assert stored("jax", H200.name) is stored("torch", "NVIDIA H100") is None
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_name_makes_no_path_of_its_own(home: Path):
    assert path_of("jax", "../a b/c:d").parent == home / ".cache" / "ring-attn"


@pytest.mark.parametrize("text", ["", "{}", "[1]", "{", "\0", H200.to_json().replace("640", "-640")])
def test_a_damaged_record_is_named_with_the_remedy(text: str):
    save(H200, "torch").write_text(text)
    with pytest.raises(ValueError, match=r"torch-NVIDIA-H200\.json.* run ring-attn doctor --measure again, or delete the file"):
        stored("torch", H200.name)


def test_a_folder_in_its_place_is_named():
    path_of("torch", "x").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"torch-x\.json is a folder"):
        stored("torch", "x")


def test_a_user_without_a_home_has_no_record(monkeypatch: pytest.MonkeyPatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert stored("torch", H200.name) is None


def test_a_folder_that_cannot_be_made_is_refused_in_words(home: Path):
    (home / ".cache").write_text("")
    assert stored("torch", H200.name) is None
    with pytest.raises(ValueError, match=r"cannot be written .*: make its folder writable"):
        save(H200, "torch")


@pytest.mark.parametrize(
    ("hosts", "size"),
    [
        ("aaaa", 4),
        ("aabb", 2),
        ("abcd", 1),
        ("aabbcc", 2),
        ("aab", 0),
        ("abab", 0),
        ("aabbaa", 0),
        ("abb", 0),
        ("aaabbc", 0),
        ("a", 1),
    ],
)
def test_the_ranks_of_a_host_are_consecutive_and_equally_many(hosts: str, size: int):
    assert ranks_of_a_host(list(hosts)) == size


def test_a_host_is_called_the_same_each_time():
    assert host() == host() != ""
