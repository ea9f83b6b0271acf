"""The checks that ``RingTraining`` makes of its TrainingArguments, of the Trainer and of the ring's ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import transformers
from packaging.version import Version
from transformers import TrainingArguments

from .masks import CallRing

OLDEST = Version("5.20")
"""The first release of transformers whose Trainer counts the labels of a row once, however many ranks shard it."""


def check_arguments(args: TrainingArguments) -> None:
    """Raise ValueError if TrainingArguments are not supported, or if transformers is older than release ``OLDEST``."""
    if Version(transformers.__version__) < OLDEST:
        raise ValueError(
            f"RingTrainer needs transformers {OLDEST} or newer, whose Trainer counts the labels of a row that ranks share once, "
            f"and this is {transformers.__version__}: update it, or call the model inside sequence_parallel in a loop of your own"
        )
    if dist.is_initialized() and dist.get_world_size() != args.world_size:
        raise ValueError(
            f"the process group has {dist.get_world_size()} ranks, and TrainingArguments knows of {args.world_size}: start with "
            "torchrun, and without GPUs pass use_cpu=True"
        )
    rows: Any = args.accelerator_config
    refused = {
        "n_gpu": (args.n_gpu > 1, "one process would drive several GPUs: start one a GPU, with torchrun"),
        "average_tokens_across_devices": (
            args.world_size > 1 and not args.average_tokens_across_devices,
            "every rank has a part of a row's labels, which only all of them count rightly: leave it True",
        ),
        "label_smoothing_factor": (args.label_smoothing_factor != 0, "its loss is made of whole logits: leave it 0"),
        "neftune_noise_alpha": (
            args.neftune_noise_alpha is not None,
            "its noise depends on the length of a row, of which every rank has a part: leave it out",
        ),
        "torch_compile": (
            bool(args.torch_compile),
            "it would compile the call that shards whole rows: leave it False, or torch.compile(model) and a loop of your own",
        ),
        "use_liger_kernel": (bool(args.use_liger_kernel), "its loss is made in the model: leave it False, and pass loss_chunk"),
        "deepspeed": (args.deepspeed is not None, "its engine divides gradients in its own way: use DDP or fsdp, version 2"),
        "train_sampling_strategy": (
            args.train_sampling_strategy == "batch_rebalance",
            '"batch_rebalance" deals rows to ranks, not to rings: choose another',
        ),
        "dispatch_batches": (bool(rows.dispatch_batches), "one rank would read all rows: leave it None in accelerator_config"),
        "eval_use_gather_object": (
            bool(args.eval_use_gather_object),
            "rows of several rings are gathered as tensors, each once: leave it False",
        ),
        "loss_type": (
            isinstance(losses := getattr(args, "loss_type", None), str) and losses != "nll",  # DPOTrainer's are a list
            'SFTTrainer\'s other losses are made of what its own head returns: leave it "nll", or "chunked_nll", its old name',
        ),
        "precompute_ref_log_probs": (
            bool(getattr(args, "precompute_ref_log_probs", False)),
            "the reference model would run before the ring is on: leave it False",
        ),
    }
    for name, (is_set, why) in refused.items():
        if is_set:
            raise ValueError(f"a Trainer on a ring cannot honour {name}={getattr(args, name, True)}: {why}")


def check_trainer(trainer: Any) -> None:
    """Raise ValueError if a Trainer has a compute_loss_func, a model_init, trl's auxiliary loss or FSDP version 1."""
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
    """Raise ValueError if parallelism_config does not fit the ring, or if rings are not equal blocks of consecutive ranks."""
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
    members = dist.get_process_group_ranks(ring.group)
    world = dist.get_world_size()
    first = dist.get_rank() // ranks * ranks
    if world % ranks or members != list(range(first, first + ranks)):
        raise ValueError(
            f"the ring of rank {dist.get_rank()} is ranks {members} of {world}: a Trainer's rings are of consecutive ranks, as "
            f"{list(range(ranks))}, and equally large"
        )
