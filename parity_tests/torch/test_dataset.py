"""Behind a DataLoader any number of workers gives the same batches in the same order, forked or spawned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ring_attn_torch import SequenceShardedDataset

from ..support import corpus
from ..support.corpus import LENGTH

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, sys
from torch.utils.data import DataLoader
from ring_attn_torch import SequenceShardedDataset

def loaded(folder, length, workers, start, taken=0):
    data = SequenceShardedDataset(folder, length, ranks=2, rank=1, batch_size=2, epochs=2)
    data.resume(data.state(taken))
    loader = DataLoader(data, batch_size=None, num_workers=workers, multiprocessing_context=start)
    found = [[shard.ids.tolist(), shard.labels.tolist(), shard.extents.tolist(), shard.length] for shard in loader]
    try:
        return found, data.state()
    except ValueError as error:
        return found, str(error)

if __name__ == "__main__":
    folder, length = sys.argv[1], int(sys.argv[2])
    asked = [(0, None), (1, "fork"), (3, "fork"), (8, "fork"), (2, "spawn"), (3, "fork", 5)]
    print(json.dumps([loaded(folder, length, *each) for each in asked]))
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_0_or_8_workers_give_the_same_batches(tmp_path):
    """In a process of its own: what is forked must not have started threads of JAX."""
    corpus.write_texts(tmp_path / "data")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "data"), str(LENGTH)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (alone, state), *others, (resumed, _) = json.loads(done.stdout)
    assert len(alone) == json.loads(state)["batches"] > 8
    for batches, said in others:
        assert batches == alone
        assert "say how many batches the loop took since the very beginning, dataset.state(batches=...)" in said
    assert resumed == alone[5:]


def test_every_iteration_begins_where_the_run_was_resumed(tmp_path):
    corpus.write_texts(tmp_path)
    data = SequenceShardedDataset(tmp_path, LENGTH)
    first = [shard.ids.tolist() for shard in data]
    assert [shard.ids.tolist() for shard in data] == first
    data.resume(data.state(3))
    assert [shard.ids.tolist() for shard in data] == first[3:]
    assert json.loads(data.state())["batches"] == len(first)
