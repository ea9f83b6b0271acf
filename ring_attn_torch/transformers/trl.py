"""Checks of trl's Trainers on a ring, and of calls with trl's own head.

trl's ``add_fused_lm_head`` replaces a model's forward. A call with ``fused_lm_head=True`` then returns the log-probability of
each label in place of logits. On a ring each rank computes the log-probabilities of its own labels, and ``with_log_probs`` of
``loss.py`` gathers those of all ranks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

TRAINERS = ("SFTTrainer", "DPOTrainer")
"""trl's Trainers that run on a ring."""


def of_trl(kind: type) -> bool:
    """Return True if a class is defined in trl."""
    return kind.__module__.partition(".")[0] == "trl"


def is_sft(kind: type) -> bool:
    """Return True if a class is trl's SFTTrainer, which on a ring computes the model's own loss."""
    return of_trl(kind) and kind.__name__ == "SFTTrainer"


def check_kind(trainer: Any) -> None:
    """Raise ValueError if a Trainer extends one of trl with its own loss, such as GRPOTrainer, that is not in ``TRAINERS``."""
    for kind in type(trainer).__mro__:
        if of_trl(kind) and kind.__name__ not in TRAINERS and {"compute_loss", "_compute_loss"} & vars(kind).keys():
            raise ValueError(
                f"a Trainer on a ring cannot compute the loss of trl's {kind.__name__}: it runs {' and '.join(TRAINERS)}. For "
                "another loss call the model inside sequence_parallel in a loop of your own, as examples/grpo_tree.py does. "
                "examples/grpo_trl.py has a subclass of GRPOTrainer for a ring"
            )


def check_call(model: nn.Module, given: dict[str, Any]) -> None:
    """Raise ValueError if a call with ``fused_lm_head=True`` cannot run."""
    if not given.get("fused_lm_head"):
        return
    who = f"{type(model).__name__} got fused_lm_head=True"
    if "fused_lm_head" not in getattr(getattr(model.forward, "__code__", None), "co_varnames", ()):
        raise ValueError(
            f"{who}, and has no head of trl: call trl's add_fused_lm_head(model), of trl.trainer.utils, before, or leave it out"
        )
    if not {"labels", "shift_labels"} & given.keys():
        raise ValueError(f"{who} without labels, whose log-probabilities it returns: pass them")
    for name in {"label_weights", "ignore_index"} & given.keys():
        raise ValueError(f"{who} and {name}, which trl's head does not take: leave it out")
