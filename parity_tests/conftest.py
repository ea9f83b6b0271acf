"""Eight host devices for JAX, one pool of gloo processes for PyTorch, the selection for CI, and which files share a process."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from .support.selection import mark_repeats
from .support.timings import UNKNOWN, Timings, read_seconds
from .support.warm import CACHE, QUICK, collect_rarely

EIGHT = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of two workers wait for each other longer than small products take
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a GPU is shared with PyTorch and with other processes
if QUICK:
    os.environ.update(CACHE | os.environ)
os.environ["XLA_FLAGS"] = f"{QUICK} {os.environ.get('XLA_FLAGS', '')} {EIGHT}"  # of two that differ the last one counts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the whole grid, not the selection for CI")
    parser.addoption("--timings", metavar="FILE", help="write the seconds of every test and file to FILE, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    collect_rarely()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Timings(config.getoption("--timings")))


class File(pytest.Module):
    """A file of tests, skipped if a package that it imports is not installed."""

    def _getobj(self) -> Any:
        try:
            return super()._getobj()
        except self.CollectError as error:
            cause: BaseException | None = error
            while cause := cause.__cause__:
                name = isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0]
                if name and find_spec(name) is None:
                    pytest.skip(f"needs {name}", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return File.from_parent(parent, path=module_path)


@pytest.hookimpl(tryfirst=True)  # before pytest reads -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin grids; leave out the whole grid without --full, and random campaigns unless ``-m`` names them."""
    mark_repeats(items)
    wanted = {"full": config.getoption("--full"), "campaign": "campaign" in str(config.getoption("markexpr"))}
    unwanted = [name for name in wanted if not wanted[name]]
    left_out = {item for item in items if any(map(item.get_closest_marker, unwanted))}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    collect_rarely()  # again, for what the test files have imported


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile``, the longest file first, so that the workers end together; those of ``WITH`` run in one process."""
    from xdist.scheduler import LoadFileScheduling

    seconds: Counter[str] = Counter()
    target = "test" if "not exhaustive" in str(config.getoption("markexpr")) else "test-all"
    for file, of_file in read_seconds(target).items():
        seconds[_unit(file)] += of_file

    class LongestFirst(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _unit(super()._split_scope(nodeid))

        def _assign_work_unit(self, node: Any) -> None:
            self.workqueue.move_to_end(max(self.workqueue, key=lambda file: seconds[file] or UNKNOWN), last=False)
            super()._assign_work_unit(node)

    return LongestFirst(config, log) if config.getvalue("dist") == "loadfile" else None


WITH = {
    "parity_tests/test_generate_parity.py": "parity_tests/jax/test_generate.py",
    "parity_tests/torch/test_balanced_kernels.py": "parity_tests/torch/test_kernels.py",
    "parity_tests/torch/test_decode_kernels.py": "parity_tests/torch/test_kernels.py",
    "parity_tests/torch/test_tile_lists.py": "parity_tests/torch/test_kernels.py",
    "parity_tests/core/test_broken_triton.py": "parity_tests/core/test_backends.py",
    "parity_tests/core/test_bound_launch.py": "parity_tests/core/test_backends.py",
    "parity_tests/core/test_binary.py": "parity_tests/core/test_backends.py",
    "parity_tests/core/test_kernels.py": "parity_tests/core/test_backends.py",
    "parity_tests/core/test_hopper.py": "parity_tests/core/test_backends.py",
}
"""Files that compare what another file's tests have computed, start the same pool of processes or compile the same kernels."""

TRANSFORMERS = "parity_tests/torch/test_transformers_"
"""The beginning of the names of files that start a pool of processes which import transformers."""


def _unit(file: str) -> str:
    """Return the name of the files that run in one process with ``file``."""
    return TRANSFORMERS if file.startswith(TRANSFORMERS) else WITH.get(file, file)


tests = itertools.count(1)


def pytest_runtest_teardown() -> None:
    """Forget compiled programs if they would disturb the next test.

    PyTorch compiles a function for eight sets of guards only, and every module's call is one function. XLA maps memory for
    every program that it compiles, and Linux gives a process 65,530 maps: the whole grid takes more.
    """
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    maps, jax = Path("/proc/self/maps"), sys.modules.get("jax")
    if next(tests) % 20 == 0 and jax and maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def gloo():
    """The pool of parity_tests/support/spawn.py: ``gloo(ranks, function, *arguments)``."""
    pytest.importorskip("torch")
    from .support.spawn import Ranks

    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def warm_workers():
    """Fork the workers of our commands from the server of parity_tests/support/warm.py: a new one imports for many seconds."""
    from .support import warm

    with patch("ring_attn_cli.processes.choose_context", lambda *_: warm.context("torch", "jax")):
        yield


@pytest.fixture(scope="session")
def interpreter(pytestconfig: pytest.Config):
    """Such a pool of three, or of four with --full, where Triton interprets its kernels: a spawned process takes seconds."""
    pytest.importorskip("triton")
    from .support.spawn import Ranks

    pool = Ranks(environment={"TRITON_INTERPRET": "1"}, most=4 if pytestconfig.getoption("--full") else 3)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four():
    """Such a pool of four, each of which has made the models of transformers, so that none comes late to another's first call."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from .support import warm
    from .support.spawn import Ranks
    from .torch.hugging_face import ready

    pool = Ranks(most=4, needed=(warm.HUGGING_FACE,))
    pool(4, ready)
    yield pool
    pool.close()
