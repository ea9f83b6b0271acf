"""The checks of a Trainer on a ring: each refusal names the argument, and what to pass."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .masks import CallRing

TRAINERS = ("SFTTrainer", "DPOTrainer")
"""trl's Trainers that run on a ring. SFTTrainer computes the model's own loss there."""


def of_trl(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "trl"


def check_kind(trainer: Any) -> None:
    for kind in type(trainer).__mro__:
        if of_trl(kind) and kind.__name__ not in TRAINERS and {"compute_loss", "_compute_loss"} & vars(kind).keys():
            raise ValueError(
                f"a Trainer on a ring cannot compute the loss of trl's {kind.__name__}: it runs {' and '.join(TRAINERS)}. For "
                "another loss call the model inside sequence_parallel in a loop of your own, as examples/grpo_tree.py does. "
                "examples/grpo_trl.py has a subclass of GRPOTrainer for a ring"
            )


def check_trainer(trainer: Any) -> None:
    for name, why in (
        ("compute_loss_func", "it would get a shard of the logits and whole labels: leave it out"),
        ("model_init", "pass the model, and make it with one seed on all ranks"),
    ):
        if getattr(trainer, name, None):
            raise ValueError(f"a Trainer on a ring takes no {name}: {why}")
    if getattr(trainer, "aux_loss_enabled", False):
        raise ValueError(
            f"a Trainer on a ring takes no auxiliary loss of trl, and router_aux_loss_coef is {trainer.router_aux_loss_coef}: "
            f"trl weighs it in its own way. Pass router_aux_loss_coef=0.0 in {type(trainer.args).__name__} or in the model's "
            "config, or use RingTrainer"
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version != 2:
        raise ValueError('a Trainer on a ring takes FSDP of version 2, got version 1: write "version": 2 in fsdp_config')


def check_group(ring: CallRing, config: Any) -> None:
    ranks = ring.ranks
    if config is not None and (config.tp_size > 1 or config.sp_size > 1):
        raise ValueError(
            f"parallelism_config has tp_size={config.tp_size} and sp_size={config.sp_size}, and a Trainer on a ring knows "
            "cp_size, dp_shard_size and dp_replicate_size: leave the others 1"
        )
    if config is not None and config.cp_size not in (1, ranks):
        raise ValueError(
            f"the ring has {ranks} ranks and parallelism_config says cp_size={config.cp_size}: leave group out, which makes the "
            "cp axis the ring, or cp_size"
        )
    if config is not None and config.cp_size != ranks and config.total_size > 1:
        raise ValueError(f"parallelism_config has no cp axis for the ring of {ranks} ranks: pass cp_size={ranks} in it")
    if ring.group is None or ranks == 1:
        return
    members, world, first = dist.get_process_group_ranks(ring.group), dist.get_world_size(), dist.get_rank() // ranks * ranks
    if world % ranks or members != list(range(first, first + ranks)):
        raise ValueError(
            f"the ring of rank {dist.get_rank()} is ranks {members} of {world}: a Trainer's rings are of consecutive ranks, as "
            f"{list(range(ranks))}, and equally large"
        )
