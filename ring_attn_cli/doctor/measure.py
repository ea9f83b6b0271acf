"""``ring-attn doctor --measure``: start the ranks that measure, and print and save the records of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ring_attn_core.plan.measured import check_folder, save

from ..processes import Crews, check_count, check_installed
from .timings import FITTED, NARROW, Timings, record, warning

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ring_attn_core.plan.machine import Machine

PATIENCE = 600.0
ON_CPUS = 2
"""Default number of ranks on a machine without GPUs."""

TITLES = {"torch": "PyTorch", "jax": "JAX"}


def run(framework: str, ranks: int | None, network: float, console: Console) -> None:
    """Measure this machine in one framework or both, print its records, and save them in the user's cache folder.
    ``framework``: "torch", "jax", or "both" for those that are installed. ``network``: GB/s to another host."""
    if framework not in ("both", *TITLES):
        raise ValueError(f"unknown framework {framework!r}: choose one of both, {', '.join(TITLES)}")
    if not 0 < network < 1e6:
        raise ValueError(f"--network must be a number of GB/s above 0, got {network:g}")
    frameworks = [name for name in TITLES if framework == name or (framework == "both" and find_spec(name) is not None)]
    check_installed(frameworks or TITLES)
    gpus = gpus_here()
    count = ranks_of(ranks, gpus)
    check_folder()
    for name in frameworks:
        timings = measured(name, count, gpus > 0)
        machine = record(timings, network * 1e9)
        path = save(machine, name)
        console.print(table(name, machine, timings))
        console.print(f"wrote {path}", soft_wrap=True)
        noisy = warning(machine)
        if noisy is not None:
            console.print(noisy, soft_wrap=True)
        if not gpus:
            console.print('on CPUs "auto" stays the ring; ring-attn plan --machine FILE predicts with this record')


def gpus_here() -> int:
    """Return the number of GPUs that PyTorch sees; without PyTorch, the number of NVIDIA GPUs in /dev. Create no CUDA context."""
    if find_spec("torch") is not None:
        import torch

        return torch.cuda.device_count()
    return _gpus_of_jax()


def _gpus_of_jax() -> int:
    """Count the NVIDIA GPUs by their device files in /dev, because JAX would occupy GPU memory to count them."""
    from pathlib import Path

    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])


def ranks_of(ranks: int | None, gpus: int) -> int:
    """Return ``ranks``, the number of ranks to measure, by default ``gpus``, or ``ON_CPUS`` on a machine without GPUs."""
    count = (gpus or ON_CPUS) if ranks is None else ranks
    check_count(count, "--ranks")
    if count < 2:
        raise ValueError(f"transfers are measured between at least 2 ranks, got {count}: the record is for rings of several")
    if 0 < gpus < count:
        raise ValueError(f"--ranks {count} is more than the {gpus} GPUs of this machine")
    return count


def measured(framework: str, ranks: int, gpus: bool) -> list[Timings]:
    """Start new processes that measure: one per rank in PyTorch, one for all ranks in JAX. Return one ``Timings`` per rank."""
    package = __name__.rpartition(".")[0]
    with Crews(PATIENCE) as crews:
        if framework == "torch":
            members = [(rank, ranks, gpus, crews.store, PATIENCE) for rank in range(ranks)]
            crews.start("PyTorch", f"{package}.torch_side", members)
        else:
            crews.start("JAX", f"{package}.jax_side", [(ranks, gpus)])
        return [message.data for message in crews.messages() if message.kind == "timings"]


def table(framework: str, machine: Machine, timings: Sequence[Timings]) -> RenderableType:
    """Return a printable table of ``machine`` and of its ranks' ``timings``, in units such as TFLOP/s and GB/s."""
    from rich.table import Table

    found = Table(
        "", "", title=f"{machine.name}, {len(timings)} ranks, {TITLES[framework]}", title_justify="left", title_style="bold"
    )
    found.show_header = False
    for dim in (NARROW, FITTED):
        rates = [min(each.rate(dim, backward) for each in timings) / 1e12 for backward in (False, True)]
        found.add_row(f"attention, heads of {dim}", f"{rates[0]:.3g} TFLOP/s forward, {rates[1]:.3g} backward")
    steps = machine.forward_step, machine.backward_step
    found.add_row("a step, each query and head", f"{steps[0] * 1e9:.3g} ns forward, {steps[1] * 1e9:.3g} ns backward")
    found.add_row("copies in memory", f"{machine.copies / 1e9:,.4g} GB/s")
    for size, seconds in timings[0].link:
        found.add_row(f"to the next rank, {size / 2**20:.3g} MiB", f"{size / seconds / 1e9:.3g} GB/s")
    found.add_row("to the next rank", f"{machine.links[-1][1] / 1e9:.3g} GB/s after {machine.latency * 1e6:.3g} us")
    if machine.contention:
        found.add_row("kernels beside a transfer", f"{machine.contention:.0%} of its time longer")
    if machine.peer:
        found.add_row(
            "copy engine, from the next rank", f"{machine.peer / 1e9:.3g} GB/s after {machine.peer_latency * 1e6:.3g} us"
        )
    elif timings[0].no_peer:
        found.add_row("copy engine, from the next rank", f"not measured: {timings[0].no_peer}")
    found.add_row("all-gather, received", f"{machine.collective / 1e9:.3g} GB/s")
    found.add_row("to another host, as given", f"{machine.network / 1e9:.3g} GB/s")
    hosts = machine.host_forward, machine.host_backward, machine.host_send, machine.host_copy
    found.add_row("host: forward, backward, send, copy", ", ".join(f"{each * 1e6:.3g}" for each in hosts) + " us")
    if machine.peer:
        pull, push = (
            (machine.host_pull_forward, machine.host_pull_backward),
            (machine.host_push_forward, machine.host_push_backward),
        )
        found.add_row("host: a step of pull, push", ", ".join(f"{f * 1e6:.3g} / {b * 1e6:.3g}" for f, b in (pull, push)) + " us")
    found.add_row("memory of a rank", f"{machine.memory / 2**30:.4g} GiB")
    return found
