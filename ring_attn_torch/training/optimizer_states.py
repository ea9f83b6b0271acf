"""The optimizer in a checkpoint: its states by parameter name, and the settings, such as lr, of its parameter groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ring_attn_core.validation import in_words

from ..ring.groups import is_dtensor

States = dict[str, dict[str, Tensor]]
"""State tensors by parameter name and state name (exp_avg, ...). A parameter without states has no entry."""

StateKinds = dict[str, dict[str, list[Any]]]
"""[dtype, shape] of each state, by parameter name and state name. Shape: that of the whole DTensor, None for a plain tensor."""

STATE = "optimizer.state."
"""Prefix of the names of states in a checkpoint, followed by the names of the parameter and of the state."""


def innermost(optimizer: torch.optim.Optimizer | None) -> Any:
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[union-attr]
    return optimizer


def check_kept(optimizer: Any, kept: Any) -> None:
    """Raise ValueError if a checkpoint of ``kept``, the innermost optimizer, would lack states that ``optimizer`` holds."""
    if not hasattr(kept, "param_groups"):
        raise ValueError(
            f"optimizer must be one torch.optim.Optimizer, got {in_words(optimizer)}: save each of several optimizers by "
            "Checkpoints of a folder of its own"
        )
    inside = [optimizer, *vars(optimizer).values(), *vars(kept).values()]
    others = [x for x in inside if isinstance(x, torch.optim.Optimizer) and x.state and x.state is not kept.state]
    if others:
        raise ValueError(
            f"{class_of(optimizer)} keeps states in several optimizers, and a checkpoint has those of one: {class_of(others[0])} "
            "would lose its own. Pass one optimizer; to shard states over ranks use FSDP2, not ZeroRedundancyOptimizer"
        )


def parameters_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return, by name, the model's parameters that the optimizer holds. Names lack the prefixes of wrappers such as DDP."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    listed = [p for p in model.parameters() if p in stepped]
    if not listed:
        return {}
    # torch returns only the names of states, so give each parameter a state in an SGD: its index in ``listed``.
    numbers = torch.optim.SGD(listed)
    for number, p in enumerate(listed):
        numbers.state[p] = {"number": torch.tensor(number)}
    found = get_optimizer_state_dict(model, numbers, options=StateDictOptions(flatten_optimizer_state_dict=True))
    states = {name: x for name, x in found.items() if name.startswith("state.")}
    return {name.removeprefix("state.").removesuffix(".number"): listed[int(x)] for name, x in states.items()}  # type: ignore[arg-type]


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> States:
    """Return the optimizer's states. Raise ValueError if a state is not a tensor, or belongs to a parameter outside the model."""
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
    """Return the states in one flat dict, named as in a checkpoint: ``optimizer.state.<parameter>.<state>``."""
    return {f"{STATE}{name}.{key}": x for name, each in states.items() for key, x in each.items()}


def held_states(held: Iterable[str]) -> dict[str, set[str]]:
    """Return the state names of each parameter, from the names of all tensors in a checkpoint."""
    found: dict[str, set[str]] = {}
    for name in held:
        if name.startswith(STATE):
            parameter, _, key = name.removeprefix(STATE).rpartition(".")
            found.setdefault(parameter, set()).add(key)
    return found


def check_tensors(values: Mapping[str, Any]) -> None:
    """Raise ValueError, naming up to eight values, if any is not a tensor, or one that a checkpoint's files cannot hold."""
    strange = [f"{name} is {in_words(x)}" for name, x in values.items() if not isinstance(x, Tensor)]
    if fsdp1 := [name for name, x in values.items() if type(x).__name__ == "ShardedTensor"]:
        raise ValueError(f"{', '.join(fsdp1[:8])}: sharded by FSDP of version 1: shard the model by fully_shard, FSDP2")
    unfit = lambda x: x.is_meta or x.layout != torch.strided or x.is_quantized or x.dtype == torch.complex128
    tensors = {name: x for name, x in values.items() if isinstance(x, Tensor) and unfit(x)}
    if not strange and tensors:
        listed = [f"{name} is {x.dtype}, {x.layout}, on {x.device}" for name, x in tensors.items()]
        raise ValueError(f"{', '.join(listed[:8])}: a checkpoint holds dense tensors with values, of any dtype but complex128")
    if strange:
        raise ValueError(
            f"{', '.join(strange[:8])}, and only tensors are saved: take another optimizer or module (torch's SparseAdam and "
            "LBFGS keep numbers and lists), or save the model without its optimizer"
        )


def kinds(states: States) -> StateKinds:
    kind = lambda x: [str(x.dtype).removeprefix("torch."), list(x.shape) if is_dtensor(x) else None]
    return {name: {key: kind(x) for key, x in each.items()} for name, each in states.items()}


def absent(everybody: Iterable[StateKinds]) -> dict[str, list[str]]:
    """Return for each rank (a str) the names of the parameters that have states on other ranks only."""
    ranks = list(everybody)
    return {str(rank): [name for name in union(ranks) if name not in each] for rank, each in enumerate(ranks)}


def union(everybody: list[StateKinds]) -> StateKinds:
    """Return the kinds of each parameter's states on the lowest rank that has any. ``everybody``: ``kinds`` in rank order."""
    return {name: states for each in reversed(everybody) for name, states in each.items()}


def with_shards(model: nn.Module, optimizer: torch.optim.Optimizer, states: States, wanted: StateKinds) -> States:
    """Return this rank's states, with zeros added for each DTensor parameter that has states on other ranks only. A checkpoint
    needs all ranks' shards. Plain tensors, such as ``step`` or NAdam's ``mu_product``, are replicas, and one rank's is enough."""
    named = parameters_by_name(model, optimizer)
    added = {}
    for name, parameter_states in wanted.items():
        if name not in states and is_dtensor(named[name]):
            zeros = lambda dtype, shape, p=named[name].detach(): p.new_zeros(shape, dtype=getattr(torch, dtype))
            added[name] = {key: zeros(*kind) for key, kind in parameter_states.items() if kind[1] is not None}
    return states | added


def places_for(model: nn.Module, optimizer: torch.optim.Optimizer, held: dict[str, set[str]]) -> States:
    """Return tensors to load states into: the optimizer's own if ``held`` has their names, else those of a step of a copy."""
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
    """Replace the optimizer's states on this rank. Parameters missing in ``states`` or listed in ``without`` get none."""
    for name, p in parameters_by_name(model, optimizer).items():
        if name in states and name not in without:
            optimizer.state[p] = states[name]
        else:
            optimizer.state.pop(p, None)


def class_of(optimizer: torch.optim.Optimizer | None) -> str | None:
    return None if optimizer is None else type(optimizer).__name__


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return each parameter group's settings, such as lr, as JSON values, with the names of its parameters."""
    names = {p: name for name, p in parameters_by_name(model, optimizer).items()}
    plain = lambda number, group: {
        name: sorted(names.get(p, "") for p in x) if name == "params" else _plain(f"{name} of group {number}", x)
        for name, x in group.items()
    }
    return [plain(number, group) for number, group in enumerate(optimizer.param_groups)]


def check_optimizer(where: Path, run: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if ``run``, read from ``where``, has no optimizer or another one: by class, parameters of groups, and
    types of settings. Checkpoints of earlier versions lack the class, and hold numbers of parameters."""
    found, kind = run.get("optimizer"), run.get("optimizer_class")
    if found is None:
        raise ValueError(f"{where} was saved without an optimizer: resume without one")
    if not isinstance(found, list) or not all(isinstance(group, dict) for group in found):
        raise ValueError(f"optimizer in {where} must be a list of objects: the checkpoint is damaged")
    if kind not in (None, class_of(optimizer)):  # None in checkpoints of an earlier version
        raise ValueError(f"the optimizer of {where} is {in_words(kind)}, and this one {class_of(optimizer)!r}: make it as it was")
    own = groups_of(model, optimizer)
    count = lambda x: len(x) if isinstance(x, list) else x  # earlier versions stored only the number
    theirs, mine = ([count(group.get("params")) for group in groups] for groups in (found, own))
    if theirs != mine:
        raise ValueError(f"the optimizer of {where} has groups of {theirs} parameters, and this one of {mine}: make it as it was")
    for number, (group, other) in enumerate(zip(own, found, strict=True)):
        elsewhere = [x for x in other["params"] if x not in group["params"]] if isinstance(other["params"], list) else []
        if elsewhere:
            raise ValueError(
                f"group {number} of the optimizer of {where} has {', '.join(map(str, elsewhere[:8]))}, and that of this one has "
                "not: make the groups as they were"
            )
        for name, x in other.items():
            if name != "params" and not _alike(group.get(name), x):
                raise ValueError(
                    f"{name} of group {number} of the optimizer in {where} is {in_words(x)}, and here {in_words(group[name])}: "
                    "make the optimizer as it was; if it is the same, the checkpoint is damaged"
                )


def set_groups(optimizer: torch.optim.Optimizer, found: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, found, strict=True):
        group.update({name: _restore(group.get(name), x) for name, x in values.items() if name != "params"})


def _plain(name: str, x: Any) -> Any:
    """Return a setting as a JSON value: a tensor of one number as that number, a tuple as a list."""
    if isinstance(x, Tensor) and x.numel() == 1:
        x = x.item()
    if isinstance(x, list | tuple):
        return [_plain(name, each) for each in x]
    try:
        if json.loads(json.dumps(x)) == x:
            return x
    except (TypeError, ValueError, RecursionError):
        pass
    raise ValueError(
        f"{name} of the optimizer is {in_words(x)}, which a checkpoint cannot carry: make it a Python number, flag or text, or a "
        "tensor of one number"
    )


def _restore(own: Any, x: Any) -> Any:
    """Return the checkpoint's value ``x`` in the type of ``own``: a tensor, filled in place; a tuple unless ``own`` is a list."""
    if isinstance(own, Tensor):
        return own.fill_(x)
    if not isinstance(x, list) or isinstance(own, list):
        return x
    return tuple(map(_restore, own, x)) if isinstance(own, tuple) else tuple(x)


def _alike(mine: Any, theirs: Any) -> bool:
    """Return True if a setting is of the same type (number, bool, text, list) in a checkpoint and in the optimizer. ``theirs``
    may be None for a bool or in a list, and anything if ``mine`` is None or of another type."""
    if isinstance(mine, list | tuple):
        same = isinstance(theirs, list) and len(theirs) == len(mine)
        return same and all(x is None or _alike(own, x) for own, x in zip(mine, theirs, strict=True))
    if mine is None or isinstance(mine, bool):
        return mine is None or theirs is None or isinstance(theirs, bool)
    if isinstance(mine, int | float):
        return isinstance(theirs, int | float) and not isinstance(theirs, bool)
    return not isinstance(mine, str) or isinstance(theirs, str)


def _first_states(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: nn.Parameter) -> dict[str, Any]:
    """Return the states that the optimizer creates for ``p`` of ``group``, by a step on a copy of ``p`` with gradient 0."""
    copy = p.detach().clone().requires_grad_()
    copy.grad = torch.zeros_like(p)
    other = object.__new__(type(optimizer))
    hooks = {name: type(x)() for name, x in vars(optimizer).items() if name.endswith("_hooks")}
    lr = {"lr": group["lr"].clone()} if isinstance(group.get("lr"), Tensor) else {}
    vars(other).update(vars(optimizer) | hooks, param_groups=[group | lr | {"params": [copy]}])
    other.state = type(optimizer.state)(dict)  # type: ignore[call-arg]
    vars(other).pop("step", None)  # a scheduler's wrapper, which counts steps of the original optimizer
    with torch.no_grad():
        other.step()
    return other.state.get(copy, {})
