"""The folder of checkpoints on file systems that rename in parts, show files late, or lock on one host only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ring_attn_core.model import checkpoint_folder, folder_lock
from ring_attn_core.model.checkpoint_folder import RUN, CheckpointFolder, check_files, digests, wait_for
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.progress import ITEMS, ResumePoint, progress_of, write_run

from ..support.flushed import Disk

ROOT = str(Path(__file__).resolve().parents[2])


def folder(path: Path) -> CheckpointFolder:
    return CheckpointFolder(path, "step-{:09}")


def saved(checkpoints: CheckpointFolder, step: int, text: str = "shard") -> Path:
    new = checkpoints.begin(step)
    (new / "a.safetensors").write_text(text)
    (new / "part").mkdir()
    (new / "part" / "b").write_text(text)
    checkpoints.commit(new, step, {"step": step, "files": digests(new)})
    return checkpoints.where(step)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "LAG", 0.2)


def test_a_checkpoint_without_run_json_is_not_complete_and_the_next_save_deletes_it(tmp_path: Path):
    checkpoints = folder(tmp_path)
    saved(checkpoints, 1)
    half = saved(checkpoints, 2)
    (half / RUN).unlink()
    assert checkpoints.steps() == [1]
    saved(checkpoints, 3)
    assert checkpoints.steps() == [1, 3]
    assert not half.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="it asks Linux for the name of an open file")
def test_a_complete_checkpoint_survives_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = Disk().watch(monkeypatch)
    where = saved(folder(tmp_path), 1)
    assert disk.holds(where / RUN)
    assert disk.names(where / RUN)
    assert disk.names(where)


def test_the_newest_checkpoint_is_that_of_the_greatest_step_and_not_of_the_last_name(tmp_path: Path):
    checkpoints = CheckpointFolder(tmp_path, "step_{}")
    for step in (9, 10):
        saved(checkpoints, step)
    assert checkpoints.steps() == [9, 10]
    checkpoints.delete_old(1)
    assert checkpoints.steps() == [10]


def test_a_checkpoint_or_a_file_in_place_of_the_folder_of_checkpoints_is_refused(tmp_path: Path):
    where = saved(folder(tmp_path), 1)
    (tmp_path / "file").touch()
    messages = {where: rf"is a checkpoint: pass the folder that holds it, {tmp_path}$", tmp_path / "file": "is a file"}
    for path, message in messages.items():
        for call in (folder(path).steps, lambda path=path: folder(path).begin(2)):
            with pytest.raises(ValueError, match=message):
                call()
    assert not (where / ".lock").exists()


def test_a_rename_of_a_folder_that_a_kill_cuts_short_leaves_nothing_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint_folder, "LAG", 0.1)
    checkpoints = folder(tmp_path)
    saved(checkpoints, 1)

    def cut_short(self: Path, target: Path) -> None:
        target.mkdir()
        shutil.copy(self / "a.safetensors", target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", cut_short)
        with pytest.raises(KeyboardInterrupt):
            saved(checkpoints, 2)
    assert checkpoints.steps() == [1]
    saved(checkpoints, 2, "again")
    assert checkpoints.steps() == [1, 2]
    assert (checkpoints.where(2) / "a.safetensors").read_text() == "again"


def test_a_checkpoint_that_cannot_be_renamed_is_copied_and_run_json_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(self: Path, target: Path) -> None:
        assert not (checkpoints.where(1) / RUN).exists()
        raise OSError(95, "Operation not supported")

    checkpoints = folder(tmp_path)
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, refused)
    where = saved(checkpoints, 1)
    run = {"files": digests(where, ["a.safetensors", "part/b"])}
    assert checkpoints.steps() == [1]
    check_files(where, run, ".safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", where.name]
    assert sorted(path.name for path in where.iterdir()) == ["a.safetensors", "part", RUN]


def test_a_checkpoint_that_cannot_be_deleted_is_told_and_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoints = folder(tmp_path)
    for step in (1, 2):
        saved(checkpoints, step)

    def refused(path: Path, **_: Any) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(checkpoint_folder, "rmtree", refused)
    assert "step-000000001 could not be deleted: [Errno 16]" in checkpoints.delete_old(1)
    assert checkpoints.steps() == [2]


def test_a_file_that_a_file_system_shows_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    exists, asked = Path.exists, []

    def late(self: Path, **keywords: Any) -> bool:
        asked.append(self)
        return len(asked) > 3 and exists(self, **keywords)

    monkeypatch.setattr(Path, "exists", late)
    assert wait_for(tmp_path)
    assert not wait_for(tmp_path / "nowhere")


HOLDER = """
import pathlib, sys, time
from ring_attn_core.model.checkpoint_folder import CheckpointFolder
checkpoints = CheckpointFolder(pathlib.Path(sys.argv[1]), "step-{:09}")
checkpoints.begin(int(sys.argv[2]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_writer_is_refused_until_the_first_is_killed(tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": ROOT}
    for number in range(5):
        command = [sys.executable, "-c", HOLDER, str(tmp_path), str(number + 1)]
        first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert first.stdout is not None
        try:
            assert first.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match=rf"is in use: process {first.pid} on .* Wait for its end, or give this run"):
                folder(tmp_path).begin(number + 1)
        finally:
            first.send_signal(signal.SIGKILL)
            first.communicate()
        checkpoints = folder(tmp_path)
        saved(checkpoints, number + 1)
        checkpoints.release()
        assert checkpoints.steps() == [*range(1, number + 2)]


def test_a_second_writer_of_this_process_is_refused_until_the_first_lets_go(tmp_path: Path):
    first, second = folder(tmp_path), folder(tmp_path)
    saved(first, 1)
    half = first.begin(2)
    with pytest.raises(ValueError, match=r"is in use: other Checkpoints of this process save there\. close\(\) them first, or"):
        second.begin(3)
    assert half.exists()
    first.release()
    saved(second, 2)
    with pytest.raises(ValueError, match="is in use: other Checkpoints"):
        first.begin(3)


@pytest.mark.parametrize("kind", ["of one host", "none"])
def test_the_run_that_came_first_stops_if_locks_keep_no_run_out(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def flock(*_: object) -> None:
        if kind == "none":
            raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    first, second = folder(tmp_path), folder(tmp_path)
    saved(first, 1)
    new = first.begin(2)
    (new / "a.safetensors").write_text("first")
    folder_lock._held.clear()  # another process
    saved(second, 2, "second")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"was taken over by another run, process \d+ on .*: end one of the two"):
            first.begin(3)
    with pytest.raises(OSError, match="was taken over by another run"):
        first.commit(new, 2, {})
    assert second.steps() == [1, 2]
    assert (second.where(2) / "a.safetensors").read_text() == "second"


def test_a_file_that_changed_after_it_was_saved_is_named(tmp_path: Path):
    where = saved(folder(tmp_path), 1)
    run = {"files": digests(where, ["a.safetensors", "part/b"])}
    check_files(where, run, ".safetensors")
    check_files(where, {}, ".safetensors")  # of an earlier version
    for change, message in (
        (lambda: (where / "part" / "b").write_text("shbrd"), r"part/b is damaged, its SHA-256 is not that"),
        (lambda: (where / "part" / "b").write_text("shar"), r"part/b of 4 bytes is truncated or damaged, it had 5"),
        (lambda: (where / "c.safetensors").write_text(""), r"c\.safetensors is not a file of this checkpoint"),
        (lambda: (where / "a.safetensors").unlink(), r"a\.safetensors is missing: delete .*step-000000001 to resume from"),
    ):
        change()
        with pytest.raises(ValueError, match=message):
            check_files(where, run, ".safetensors")


@pytest.mark.parametrize("files", ["x", [], {"a": 3}, {"a": ["3", "x"]}, {"a": [3]}, {"../a": [3, "x"]}, {"/a": [3, "x"]}])
def test_digests_of_another_form_are_refused(files: Any, tmp_path: Path):
    with pytest.raises(ValueError, match=r"run\.json must give size and SHA-256 of every file"):
        check_files(tmp_path, {"files": files}, None)


@pytest.mark.parametrize(
    ("name", "value"), [("step", "x"), ("step", True), ("step", -1), ("data", 3), ("data", []), ("more", []), ("config", "x")]
)
def test_a_field_of_another_type_in_run_json_is_named(name: str, value: Any, tmp_path: Path):
    whole = {"step": 1, "data": None, "more": {}, "config": None}
    assert progress_of(tmp_path / RUN, whole, None).step == 1
    with pytest.raises(ValueError, match=rf"{name} in .*run\.json must be .*, got .*: the checkpoint is damaged"):
        progress_of(tmp_path / RUN, whole | {name: value}, None)
    with pytest.raises(ValueError, match=r"run\.json must hold a JSON object, got a list"):
        progress_of(tmp_path / RUN, [], None)


def test_a_resumed_run_may_compute_in_another_dtype_but_has_the_same_sizes():
    config = TransformerConfig(vocab=31, dim=8, depth=1, heads=1)
    written = write_run(ResumePoint(3, None, {}), config)
    for changed in ({"compute_dtype": "bfloat16"}, {"dropout_rate": 0.5}):
        assert progress_of(Path("run.json"), written, replace(config, **changed)).step == 3
    with pytest.raises(ValueError, match=r"is of another model: dim is 8 there and 16 here"):
        progress_of(Path("run.json"), written, replace(config, dim=16))
    written["config"].pop("tied")  # as a release before this field wrote it
    assert progress_of(Path("run.json"), written, config).step == 3


def test_more_that_is_nested_too_deep_for_json_is_refused_when_it_is_saved():
    more: dict[str, Any] = {}
    for _ in range(100_000):
        more = {"x": more}
    with pytest.raises(ValueError, match="more must be a dict that JSON can hold"):
        write_run((1, None, more), None)  # type: ignore[arg-type]
    while more:
        more = more.pop("x")


def test_keys_that_are_numbers_come_back_as_numbers():
    more = {"milestones": {5: 1, 8: 2}, "nested": [{None: {"5": {0.5: True}}}], ITEMS: [1], "plain": {"5": 1}}
    written = json.loads(json.dumps(write_run(ResumePoint(1, None, more), None)))
    assert progress_of(Path("run.json"), written, None).more == more
    with pytest.raises(ValueError, match=r"more must be a dict that JSON can hold.*is neither a text nor a number"):
        write_run(ResumePoint(1, None, {"x": {(1, 2): 3}}), None)
    for damaged in ([1], [[[], 1]]):
        with pytest.raises(ValueError, match="the checkpoint is damaged"):
            progress_of(Path("run.json"), written | {"more": {"x": {ITEMS: damaged}}}, None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_such_as_a_worker_of_a_data_loader_holds_no_lock(tmp_path: Path):
    checkpoints = folder(tmp_path)
    saved(checkpoints, 1)
    code = "import os, sys, time\n" + HOLDER.replace("time.sleep", "os.fork() and os._exit(0); os.close(1); time.sleep")
    checkpoints.release()
    command = [sys.executable, "-c", code, str(tmp_path), "2"]
    first = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": ROOT}, stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        assert first.communicate()[0] == "held\n"  # the process has ended, and its fork goes on
        saved(checkpoints, 2)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
    assert checkpoints.steps() == [1, 2]
