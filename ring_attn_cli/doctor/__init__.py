"""The report of ``ring-attn doctor``: versions, the devices of each framework, and each backend or why it cannot be used."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

from ring_attn_core import __version__

if TYPE_CHECKING:
    from ring_attn_core.problem.problem import Problem


@dataclass(frozen=True)
class BackendFitness:
    """One backend's fitness for a problem.
    ``objection``: why it cannot solve it. ``drawback``: why "auto" never takes it. ``taken``: the passes for which "auto" takes
    it. ``left``: why "auto" takes it for the forward only."""

    backend: str
    objection: str | None
    drawback: str | None
    taken: tuple[str, ...]
    left: str | None = None

    @property
    def auto(self) -> str:
        if not self.taken:
            return f"never: {self.drawback}" if self.drawback else ""
        if len(self.taken) == 2:
            return "takes it"
        return f"takes the {self.taken[0]}" + (f", not the backward: {self.left}" if self.left else "")


@dataclass(frozen=True)
class Finding:
    """The state of a framework here. ``words``: lines about its devices, or why it does not start, without ``choices``."""

    name: str
    words: tuple[str, ...]
    choices: tuple[BackendFitness, ...] = ()


def versions() -> dict[str, str]:
    """Return versions by name: Python, ring-attn, five optional packages, and Triton's ptxas (for GPUs older than Hopper)."""
    packages = ("jax", "jaxlib", "flax", "torch", "triton")
    own = {"python": platform.python_version(), "ring-attn": __version__}
    return own | {name: _version(name) for name in packages} | {"ptxas": _assembler()}


def typical(dtype: str, head_dim: int, v_dim: int | None = None) -> Problem:
    """Return the problem of one causal sequence of 4096 tokens on one rank, with 16 query heads and 4 kv heads."""
    from ring_attn_core.problem.problem import Problem

    q, k, v = (1, 4096, 16, head_dim), (1, 4096, 4, head_dim), (1, 4096, 4, head_dim if v_dim is None else v_dim)
    problem = Problem(q, k, v, (dtype, dtype, dtype), "cpu", ranks=1)
    problem.check()
    return problem


def findings(problem: Problem, framework: str = "both") -> list[Finding]:
    torch, jax = ("PyTorch", "torch", _torch), ("JAX", "jax", _jax)
    frameworks = {"both": (torch, jax), "torch": (torch,), "jax": (jax,)}
    if framework not in frameworks:
        raise ValueError(f"unknown framework {framework!r}: choose one of {', '.join(frameworks)}")
    found = []
    for name, package, look in frameworks[framework]:
        if find_spec(package) is None:
            found.append(Finding(name, (f'not installed: run pip install "ring-attn[{package}]"',)))
            continue
        try:
            where, words = look()
        except (ImportError, OSError, RuntimeError) as error:  # report a broken installation instead of failing on it
            found.append(Finding(name, (f"installed, but does not start: {error}".partition("\n")[0],)))
        else:
            here = replace(problem, framework=package, **where)
            found.append(Finding(name, words + kernels_in_words(here), choices(here)))
    return found


def kernels_in_words(problem: Problem) -> tuple[str, ...]:
    """Return a line that says how many kernels of the problem Triton's cache has; no line if the problem needs none."""
    from ring_attn_core.kernels.backends import launches
    from ring_attn_core.kernels.compile import cache_folder, is_cached

    needed = {launch.specialization(problem.capability): launch for launch in launches(problem)}
    if not needed:
        return ()
    have = sum(is_cached(launch, problem.capability) for launch in needed.values())
    advice = "" if have == len(needed) else "; ring-attn compile compiles a model's kernels ahead"
    return (f"{have} of the {len(needed)} kernels of this problem are compiled, in {cache_folder()}{advice}",)


def choices(problem: Problem) -> tuple[BackendFitness, ...]:
    """Return each backend's fitness in the order in which "auto" tries them; if kernels do not compile, it tries the next."""
    from ring_attn_core.kernels.backends import BACKENDS, select

    forward = select(problem)
    left = next(x.leaves(problem) for x in BACKENDS if x.name == forward)
    passes = {forward: ("forward", "backward")} if left is None else {forward: ("forward",), "triton": ("backward",)}
    return tuple(
        BackendFitness(
            x.name, x.objection(problem), x.drawback(problem), passes.get(x.name, ()), left if x.name == forward else None
        )
        for x in BACKENDS
    )


def report(problem: Problem, found: Iterable[Finding]) -> Group:
    """Return the whole report of ``ring-attn doctor``. Print it with ``markup=False``, since it may contain literal brackets."""
    problem_line = f"{problem.dtypes[0]}, q {problem.q_shape}, k {problem.k_shape}, v {problem.v_shape}, causal, 1 rank:"
    parts: list[str | Table] = [*(f"{name:10}{number}" for name, number in versions().items()), "", problem_line]
    for each in found:
        parts += ["", *(f"{each.name}: {line}" for line in each.words)]
        table = Table("backend", "on the first device", '"auto"')
        for choice in each.choices:
            table.add_row(choice.backend, choice.objection or "runs", choice.auto)
        parts += [table] if each.choices else []
    return Group(*parts)


def _version(package: str) -> str:
    try:
        return "not installed" if find_spec(package) is None else version(package)
    except PackageNotFoundError:  # Triton also comes as pytorch-triton-rocm
        return "installed under another name"


def _assembler() -> str:
    if find_spec("triton") is None:
        return "not installed"
    from ring_attn_core.kernels.ptx import older_assembler

    try:
        return older_assembler() or "not installed"
    except Exception as error:  # report a broken installation instead of failing on it
        return f"triton does not start: {error}".partition("\n")[0]


def _torch() -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields of a Problem that describe PyTorch's first device, by name, and lines of text about all devices."""
    import torch

    from ring_attn_torch.attend.launch import capability

    if not torch.cuda.is_available():
        return {"device": "cpu", "capability": capability(torch.device("cpu"))}, ("CPU only",)
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {"device": "cuda", "capability": capability(gpus[0])}, _count(
        (torch.cuda.get_device_name(gpu), capability(gpu)) for gpu in gpus
    )


def _jax() -> tuple[dict[str, Any], tuple[str, ...]]:
    import jax

    from ring_attn_jax.attend.launch import capability, makes_descriptors

    devices = _count((f"{device.device_kind} ({device.platform})", capability()) for device in jax.devices())
    where = {"device": jax.default_backend(), "capability": capability(), "tma": makes_descriptors()}
    return where, (*devices, f"this jaxlib makes {'' if where['tma'] else 'no '}TMA descriptors")


def _count(devices: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    found = Counter(f"{name}, {f'compute capability {level / 10}' if level else 'no NVIDIA GPU'}" for name, level in devices)
    return tuple(f"{count} x {device}" for device, count in found.items())
