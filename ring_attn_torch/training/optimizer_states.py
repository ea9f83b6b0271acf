"""The states of an optimizer by the names of their parameters, and the settings of its groups of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ring_attn_core.mistakes import in_words

from ..ring.groups import is_dtensor

States = dict[str, dict[str, Tensor]]
"""Tensors by the name of a parameter and of a state, such as exp_avg. A parameter without a gradient so far has no entry."""


STATE = "optimizer.state."
"""What the names of states begin with in a checkpoint; the parameter's and the state's follow."""


def innermost(optimizer: torch.optim.Optimizer | None) -> Any:
    """Return the optimizer inside of wrappers such as Accelerate's."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[union-attr]
    return optimizer


def parameters_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the model's parameters that the optimizer has, by their names without those of wrappers such as DDP."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    listed = [p for p in model.parameters() if p in stepped]
    if not listed:
        return {}
    # torch names states, not parameters: those of an optimizer made here, whose state is the parameter's number.
    numbers = torch.optim.SGD(listed)
    for number, p in enumerate(listed):
        numbers.state[p] = {"number": torch.tensor(number)}
    found = get_optimizer_state_dict(model, numbers, options=StateDictOptions(flatten_optimizer_state_dict=True))
    states = {name: x for name, x in found.items() if name.startswith("state.")}
    return {name.removeprefix("state.").removesuffix(".number"): listed[int(x)] for name, x in states.items()}  # type: ignore[arg-type]


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> States:
    """Return the states that the optimizer has. Raise ValueError if one is not a tensor or its parameter is not the model's."""
    named = parameters_by_name(model, optimizer)
    strange = sum(1 for p in optimizer.state if p not in set(named.values()))
    if strange:
        raise ValueError(
            f"the optimizer has states of {strange} parameters that are not the model's: make it of model.parameters()"
        )
    found = {name: optimizer.state[p] for name, p in named.items() if optimizer.state.get(p)}
    found = {name: {key: x for key, x in states.items() if x is not None} for name, states in found.items()}
    check_tensors(flat(found))
    return found


def flat(states: States) -> dict[str, Tensor]:
    """Return the states by their names in a checkpoint."""
    return {f"{STATE}{name}.{key}": x for name, each in states.items() for key, x in each.items()}


def held_states(held: Iterable[str]) -> dict[str, set[str]]:
    """Return the names of the states of each parameter, from the names of all tensors of a checkpoint."""
    found: dict[str, set[str]] = {}
    for name in held:
        if name.startswith(STATE):
            of, _, key = name.removeprefix(STATE).rpartition(".")
            found.setdefault(of, set()).add(key)
    return found


def check_tensors(values: Mapping[str, Any]) -> None:
    """Raise ValueError that names what is not a tensor."""
    strange = [name for name, x in values.items() if not isinstance(x, Tensor)]
    if strange:
        raise ValueError(
            f"{', '.join(strange[:8])} must be tensors to be saved, as those of torch's own modules and optimizers are"
        )


def kinds(states: States) -> dict[str, dict[str, str]]:
    """Return the dtype of each state, which the ranks compare."""
    return {name: {key: str(x.dtype).removeprefix("torch.") for key, x in each.items()} for name, each in states.items()}


def absent(everybody: Iterable[dict[str, dict[str, str]]]) -> dict[str, list[str]]:
    """Return, by rank, the parameters without states there that have states on another rank."""
    ranks = list(everybody)
    return {str(rank): [name for name in union(ranks) if name not in each] for rank, each in enumerate(ranks)}


def union(everybody: list[dict[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
    """Return the dtypes of the states that any rank has."""
    return {name: states for each in reversed(everybody) for name, states in each.items()}


def with_shards(model: nn.Module, optimizer: torch.optim.Optimizer, states: States, wanted: dict[str, dict[str, str]]) -> States:
    """Return the states with zeros for the shards that other ranks need to make their own states whole.

    A plain tensor is a copy on every rank, of which one rank's is enough.
    """
    named = parameters_by_name(model, optimizer)
    added = {}
    for name, dtypes in wanted.items():
        if name not in states and is_dtensor(named[name]):
            zeros = lambda key, p=named[name], dtypes=dtypes: torch.zeros_like(p.detach(), dtype=getattr(torch, dtypes[key]))
            added[name] = {key: zeros(key) for key in dtypes if key != "step"}
    return states | added


def places_for(model: nn.Module, optimizer: torch.optim.Optimizer, held: dict[str, set[str]]) -> States:
    """Return tensors for the states of a checkpoint: the optimizer's own, or new ones that the optimizer does not know yet.

    ``held``: the names of the states of each parameter in the checkpoint. A new one is made by a step of a copy of the optimizer
    with a copy of the parameter, one at a time. Model, optimizer and generators stay as they are.
    """
    named = parameters_by_name(model, optimizer)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    found = {}
    with torch.random.fork_rng(devices):
        for name, keys in held.items():
            if name in named:
                p = named[name]
                own = optimizer.state.get(p, {})
                own = own if own.keys() == keys else _first_states(optimizer, groups[p], p)
                found[name] = {key: x for key, x in own.items() if x is not None}
    check_tensors(flat(found))
    return found


def set_states(model: nn.Module, optimizer: torch.optim.Optimizer, states: States, without: list[str]) -> None:
    """Give the optimizer these states and no others; ``without``: parameters that are to have none on this rank."""
    for name, p in parameters_by_name(model, optimizer).items():
        if name in states and name not in without:
            optimizer.state[p] = states[name]
        else:
            optimizer.state.pop(p, None)


def groups_of(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]] | None:
    """Return the numbers and flags of every group of parameters, such as lr, and how many parameters it has."""
    if optimizer is None:
        return None
    plain = lambda name, x: len(x) if name == "params" else x.item() if isinstance(x, Tensor) else x
    return [{name: plain(name, x) for name, x in group.items()} for group in optimizer.param_groups]


def check_groups(where: Path, optimizer: torch.optim.Optimizer | None, found: Any) -> None:
    """Raise ValueError if the file ``where`` has no optimizer, one with other groups, or a setting of another type."""
    if optimizer is None:
        return
    if found is None:
        raise ValueError(f"{where} was saved without an optimizer: resume without one")
    if not isinstance(found, list) or not all(isinstance(group, dict) for group in found):
        raise ValueError(f"optimizer in {where} must be a list of objects: the checkpoint is damaged")
    own = groups_of(optimizer) or []
    theirs, mine = ([group.get("params") for group in groups] for groups in (found, own))
    if theirs != mine:
        raise ValueError(f"the optimizer of {where} has groups of {theirs} parameters, and this one of {mine}: make it as it was")
    for number, (group, other) in enumerate(zip(own, found, strict=True)):
        for name, x in other.items():
            if not _alike(group.get(name), x):
                raise ValueError(
                    f"{name} of group {number} of the optimizer in {where} is {in_words(x)}, and here {in_words(group[name])}: "
                    "make the optimizer as it was; if it is the same, the checkpoint is damaged"
                )


def set_groups(optimizer: torch.optim.Optimizer, found: list[dict[str, Any]]) -> None:
    """Set what ``groups_of`` gave."""
    for group, values in zip(optimizer.param_groups, found, strict=True):
        for name, x in values.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(x)
            elif name != "params":
                group[name] = tuple(x) if isinstance(x, list) else x  # betas, of which JSON makes a list


def _alike(mine: Any, theirs: Any) -> bool:
    """Return whether two settings are of one type, a number, flag, text or list; None goes with anything."""
    if isinstance(mine, list | tuple):
        same = isinstance(theirs, list) and len(theirs) == len(mine)
        return same and all(x is None or _alike(own, x) for own, x in zip(mine, theirs, strict=True))
    if mine is None or isinstance(mine, bool):
        return mine is None or theirs is None or isinstance(theirs, bool)
    if isinstance(mine, int | float):
        return isinstance(theirs, int | float) and not isinstance(theirs, bool)
    return not isinstance(mine, str) or isinstance(theirs, str)


def _first_states(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: nn.Parameter) -> dict[str, Any]:
    """Return the states that the optimizer would give a parameter at its first step."""
    copy = p.detach().clone().requires_grad_()
    copy.grad = torch.zeros_like(p)
    other = object.__new__(type(optimizer))
    hooks = {name: type(x)() for name, x in vars(optimizer).items() if name.endswith("_hooks")}
    lr = {"lr": group["lr"].clone()} if isinstance(group.get("lr"), Tensor) else {}
    vars(other).update(vars(optimizer) | hooks, param_groups=[group | lr | {"params": [copy]}])
    other.state = type(optimizer.state)(dict)  # type: ignore[call-arg]
    vars(other).pop("step", None)  # a scheduler's, which counts steps of the optimizer itself
    with torch.no_grad():
        other.step()
    return other.state.get(copy, {})
