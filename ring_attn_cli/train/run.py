"""The run of ``ring-attn train``: check the config, lock the folder, start the ranks, and show their progress."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from ..processes import Crews, Terminated, check_count, check_installed, hear_interrupts
from . import data, folder, lock, picture
from .config import Config
from .events import FOLDER
from .loop import LOG
from .watch import TrainWatch

NEEDS = {"torch": ("torch", "safetensors"), "jax": ("jax", "flax", "optax", "orbax.checkpoint", "safetensors")}
PATIENCE = 1800.0
"""Seconds without a message after which a run in PyTorch fails, except under torchrun. A step can take minutes."""


@dataclass(frozen=True)
class Program:
    """The identity of this process in a JAX program of several processes.
    With the ``coordinator`` "auto" instead of the address of process 0, the launcher sets ``processes`` and ``process``."""

    coordinator: str
    processes: int | None = None
    process: int | None = None

    @classmethod
    def of(cls, coordinator: str | None, process: str | None) -> Program:
        """Parse ``--coordinator``, "auto" or HOST:PORT of process 0, and ``--process``, None with "auto", else such as "0/4"."""
        if coordinator == "auto" and process is None:
            return cls(coordinator)
        number, _, of = (process or "").partition("/")
        port = (coordinator or "").rpartition(":")[2]
        listens = ":" in (coordinator or "") and port.isdigit() and 0 < int(port) < 65536
        if coordinator is None or not (listens and number.isdigit() and of.isdigit() and int(number) < int(of)):
            raise ValueError(
                f"--coordinator {coordinator} with --process {process} says of no process which it is: pass auto, or "
                "--coordinator HOST:PORT --process 0/4, to the other processes 1/4 and so on"
            )
        return cls(coordinator, int(of), int(number))


def run(config: Config, framework: str, program: Program | None = None) -> None:
    """Train, or resume the run in ``config.out``, and write log, checkpoints, weights and, if possible, ``train.png`` there."""
    if framework not in NEEDS:
        raise ValueError(f"unknown framework {framework!r}: choose one of {', '.join(NEEDS)}")
    check_installed(NEEDS[framework])
    if program is not None and framework != "jax":
        raise ValueError("--coordinator is for JAX: start PyTorch on several machines with torchrun")
    folder.check(config, framework)
    console = Console(stderr=True, highlight=False, quiet=not _is_first(framework, program))
    both = data.check(config)
    if both:
        console.print(f"trained on and held out too: {both}")
    try:
        with hear_interrupts():
            _in_jax(config, program) if framework == "jax" else _in_torch(config)
    except (KeyboardInterrupt, Terminated):
        step = folder.newest(config, framework)
        words = f"from step {step}, its newest checkpoint" if step else "from the beginning, for it has no checkpoint yet"
        console.print(f"Interrupted. Started again, the run in {config.out} goes on {words}.")
        raise


def _is_first(framework: str, program: Program | None) -> bool:
    """Return True if this process prints. With coordinator "auto", every process prints, because its index is not known yet."""
    if framework == "torch":
        from . import torch_side

        return torch_side.is_first()
    return program is None or program.process in (None, 0)


def _in_jax(config: Config, program: Program | None) -> None:
    from . import jax_side

    jax_side.on_cpus(config, 1 if program is None else program.processes)
    if program is not None:
        jax_side.joined(program.coordinator, program.processes, program.process)
    first = jax_side.is_first()
    with lock.held(config, first, jax_side.of_first):
        with TrainWatch(config, Console(highlight=False, quiet=not first)) as watch:
            jax_side.run(config, watch)
        if first:
            _finish(config)


def _in_torch(config: Config) -> None:
    import torch.distributed as dist

    if dist.is_torchelastic_launched():
        from . import torch_side

        first = torch_side.is_first()
        with TrainWatch(config, Console(highlight=False, quiet=not first)) as watch:
            torch_side.launched(config, watch)
        if first:
            _finish(config)
        return
    ranks = config.ring.ranks * config.ring.replicas
    check_count(ranks, "ring.ranks times ring.replicas:")
    with lock.held(config):
        with Crews(PATIENCE) as crews:
            members = [(rank, config, crews.store) for rank in range(ranks)]
            crews.start("PyTorch", "ring_attn_cli.train.torch_side", members)
            with TrainWatch(config, Console(highlight=False)) as watch:
                for message in crews.messages():
                    watch(message.kind, message.data)
        _finish(config)


def _finish(config: Config) -> None:
    drawn = ["train.png"] if find_spec("matplotlib") is not None else []
    for name in drawn:
        picture.draw(Path(config.out, LOG), Path(config.out, name))
    sys.stdout.flush()
    written = LOG, *drawn, FOLDER, "weights", *(["adapters"] if config.lora is not None else []), "checkpoints"
    Console(highlight=False).print(f"Written: {', '.join(str(Path(config.out, name)) for name in written)}")
