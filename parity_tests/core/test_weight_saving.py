"""Weights on file systems that do not do as told: renames that fail, names that come late, two processes that save at once."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ring_attn_core.model import weight_files, weight_saving
from ring_attn_core.model.weight_files import CONFIG, INDEX, WEIGHTS, open_folder
from ring_attn_core.model.weight_saving import replacing, write

from ..support.flushed import Disk

pytest.importorskip("safetensors")


ROOT = Path(__file__).parents[2]


def save(folder: Path, value: float) -> None:
    from safetensors.numpy import save_file

    with replacing(folder) as new:
        (new / CONFIG).write_text("{}")
        write(new, [("a", np.full(5, value, np.float32))], save_file)


def value(folder: Path) -> float:
    with open_folder(folder) as held:
        return float(held.files[held.folder / WEIGHTS].weights.get_tensor("a")[0])


@pytest.mark.skipif(sys.platform != "linux", reason="it asks Linux for the name of an open file")
def test_the_name_of_a_saved_folder_survives_a_loss_of_power(tmp_path, monkeypatch):
    disk = Disk().watch(monkeypatch)
    for number in (1.0, 2.0):
        save(tmp_path / "w", number)
        assert disk.names(tmp_path / "w")


def test_the_index_counts_the_bytes_of_all_files(tmp_path, monkeypatch):
    from safetensors.numpy import save_file

    monkeypatch.setattr(weight_saving, "MAX_BYTES", 24)
    write(tmp_path, [(name, np.zeros(size, np.float32)) for name, size in (("a", 5), ("b", 2), ("c", 5), ("d", 1))], save_file)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 4 * (5 + 2 + 5 + 1)}
    assert [index["weight_map"][name] for name in "abcd"] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3, 3)]


def test_readers_of_the_folder_may_read_its_weights(tmp_path):
    def private(arrays: Any, path: Path, header: Any) -> None:
        path.write_bytes(b"")
        path.chmod(0o600)

    for mode, expected in ((0o755, 0o644), (0o770, 0o660), (0o700, 0o600)):
        folder = tmp_path / f"{mode}"
        folder.mkdir()
        folder.chmod(mode)
        write(folder, [("a", np.zeros(5))], private)
        assert stat.S_IMODE((folder / WEIGHTS).stat().st_mode) == expected


@pytest.mark.parametrize("which", [1, 2, 3])
@pytest.mark.parametrize("before", [False, True], ids=["first", "second"])
def test_nothing_is_lost_if_folders_cannot_be_renamed(tmp_path, monkeypatch, before, which):
    """As on object stores, and where a rename fails only from some call on, so that the old folder cannot be brought back."""
    if before:
        save(tmp_path / "w", 1.0)
    rename, calls = Path.rename, []

    def failing(path: Path, target: Any) -> Any:
        if path.is_dir():
            calls.append(path)
            if len(calls) >= which:
                raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    if which > (2 if before else 1):
        save(tmp_path / "w", 2.0)
    else:
        with pytest.raises(OSError, match=r"could not be saved, and what was there before is as it was: .*Invalid cross-device"):
            save(tmp_path / "w", 2.0)
    monkeypatch.undo()
    if before:
        assert value(tmp_path / "w") == (1.0 if which <= 2 else 2.0)
    save(tmp_path / "w", 3.0)
    assert value(tmp_path / "w") == 3.0
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_a_rename_that_fails_once_is_undone(tmp_path, monkeypatch):
    save(tmp_path / "w", 1.0)
    rename = Path.rename
    failing = lambda path, target: rename(path, target) if "saving" not in path.name else (_ for _ in ()).throw(OSError("no"))
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="could not be saved"):
        save(tmp_path / "w", 2.0)
    assert value(tmp_path / "w") == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_a_folder_whose_name_cannot_be_confirmed_is_saved_and_said_to_be(tmp_path, monkeypatch):
    save(tmp_path / "w", 1.0)
    to_disk = weight_saving.to_disk
    monkeypatch.setattr(
        weight_saving, "to_disk", lambda path: (_ for _ in ()).throw(OSError("no")) if path == tmp_path else to_disk(path)
    )
    with pytest.raises(OSError, match="w is saved, but a power failure may undo it: no"):
        save(tmp_path / "w", 2.0)
    assert value(tmp_path / "w") == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_a_folder_whose_name_comes_late_is_never_overwritten(tmp_path, monkeypatch):
    """The listing of another host's save lags: what it does not show yet is there all the same."""
    save(tmp_path / "w", 1.0)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path, **more: path.name != "w" and exists(path, **more))
    with pytest.raises(OSError, match="could not be saved, and what was there before is as it was"):
        save(tmp_path / "w", 2.0)
    monkeypatch.undo()
    assert value(tmp_path / "w") == 1.0


TWO = """
import sys, pathlib, numpy as np
from safetensors.numpy import save_file
from ring_attn_core.model.weight_saving import replacing, write

folder, mine = pathlib.Path(sys.argv[1]), float(sys.argv[2])
for _ in range(25):
    with replacing(folder) as new:
        (new / "config.json").write_text('{"value": %s}' % mine)
        write(new, [("a", np.full(50_000, mine, np.float32))], save_file)
"""


def test_two_processes_that_save_at_once_and_one_that_loads_see_whole_saves(tmp_path):
    save(tmp_path / "w", 1.0)
    (tmp_path / "w" / CONFIG).write_text('{"value": 1.0}')
    command = [sys.executable, "-c", TWO, str(tmp_path / "w")]
    pipes: dict[str, Any] = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
    seen = []
    with ExitStack() as stack:  # which closes the pipes, whatever fails
        writers = [stack.enter_context(subprocess.Popen([*command, mine], **pipes)) for mine in ("2.0", "3.0")]
        while any(writer.poll() is None for writer in writers):
            try:
                with open_folder(tmp_path / "w") as held:
                    time.sleep(0.001)
                    x = held.files[held.folder / WEIGHTS].weights.get_tensor("a")
                    held.check_unwritten()
            except ValueError as error:  # on a busy machine each try may find the folder replaced
                if "times while it was read: load it when no process writes there" not in str(error):
                    raise
                continue
            assert {held.config["value"]} == set(np.unique(x).tolist())
            seen.append(held.config["value"])
        for writer in writers:
            assert writer.communicate()[1] == ""
            assert writer.returncode == 0
    assert {2.0, 3.0} & set(seen)
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_a_folder_that_two_saves_hide_from_one_look_is_found_by_the_next(tmp_path, monkeypatch):
    """Between the renames of the first, after its end, and between the renames of the second."""
    save(tmp_path / "w", 1.0)
    looks, there = iter([False, False, False]), Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: next(looks, True) and there(path))
    assert value(tmp_path / "w") == 1.0


def test_a_replaced_folder_that_is_being_deleted_is_left_for_the_new_one(tmp_path, monkeypatch):
    """A look finds the old folder, then the save ends: it deletes the files of the old folder first, and then the folder."""
    save(tmp_path / "w", 1.0)
    (tmp_path / ".w.replaced").mkdir()
    (tmp_path / ".w.replaced" / CONFIG).write_text("{}")
    looks, there = iter([False]), Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: next(looks, True) and there(path))
    assert value(tmp_path / "w") == 1.0


def test_a_save_waits_for_another_and_then_replaces_it(tmp_path):
    order = []
    with replacing(tmp_path / "w") as new:
        (new / CONFIG).write_text("{}")
        thread = threading.Thread(target=lambda: (save(tmp_path / "w", 2.0), order.append("second")))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]
    assert value(tmp_path / "w") == 2.0


def test_the_lock_of_a_killed_save_does_not_hold_up_the_next(tmp_path):
    (tmp_path / weight_saving.LOCK.format("w")).write_text("")
    save(tmp_path / "w", 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_a_file_that_is_written_to_in_place_while_it_is_read_is_named(tmp_path):
    save(tmp_path / "w", 1.0)
    with open_folder(tmp_path / "w") as held:
        held.check_unwritten()
        with open(tmp_path / "w" / WEIGHTS, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\1")
        with pytest.raises(ValueError, match=f"{WEIGHTS} was written to while it was read: load it when no process writes there"):
            held.check_unwritten()


def test_a_folder_that_is_replaced_again_and_again_is_given_up(tmp_path, monkeypatch):
    save(tmp_path / "w", 1.0)
    opened, values = weight_files._open_files, iter(range(2, 99))

    def replaced(*given: Any) -> Any:
        found = opened(*given)
        save(tmp_path / "w", next(values))
        return found

    monkeypatch.setattr(weight_files, "_open_files", replaced)
    with pytest.raises(ValueError, match="was replaced 5 times while it was read: load it when no process writes there"):
        value(tmp_path / "w")
