"""The environment that torchrun gives its processes, read here alone. Without PyTorch, for which a parent must not wait."""

from __future__ import annotations

import os


def has_started() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first() -> bool:
    """Return True if this process is torchrun's first on this machine, or if torchrun did not start it."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def restart_number() -> str | None:
    """Return how often torchrun restarted the job if its store outlives restarts, else None.
    Hosts count restarts separately, so a store of several hosts that outlives restarts raises ValueError."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    if os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]:
        raise ValueError(
            "torchrun --max-restarts on several hosts needs a new store at each restart, and its agents keep the old one: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every host"
        )
    return os.environ["TORCHELASTIC_RESTART_COUNT"]
