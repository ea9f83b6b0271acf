"""The auxiliary loss of mixture-of-experts models, which balances the load of their experts, over the tokens of all ranks.

    aux = E sum_e f_e p_e      E: the number of experts
    f_e                        the number of tokens assigned to expert e, divided by the number of tokens
    p_e                        the router's probability of expert e (the softmax of its logits), averaged over the tokens

The means are over the tokens of all layers, without padding (Switch Transformer, arXiv:2101.03961, equations 4 to 6). aux is a
product of means, so averaging the aux of each shard over the ranks would give another number. Inside ``sequence_parallel``, in
calls without a cache, the model's ``load_balancing_loss_func`` therefore returns the sums over this rank's tokens, and
``with_routers`` adds them over the ranks after the model's forward. f_e has no gradient. The gradient of p_e stays on the rank
that holds the token.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ..ring.groups import Group, ranks_of
from .masks import running

FUNCTION = "load_balancing_loss_func"
"""The name of the function that computes the auxiliary loss, in the modules of transformers' models."""

TAKEN: set[Any] = set()
"""The replacements of ``load_balancing_loss_func`` that ``take_over`` has installed."""

COEFFICIENTS = "router_aux_loss_coef", "aux_loss_coef"
"""Possible names of the attribute that holds the factor of the auxiliary loss, in a model or its text part's config."""


def take_over(model: PreTrainedModel) -> None:
    """Make the model's ``load_balancing_loss_func`` return ``router_sums`` in calls on shards, or None in calls with a cache. The
    function is replaced for the whole process, and only if it computes aux by the formula of this module."""
    scope = _scope(model)
    original = scope.get(FUNCTION)
    if original is None or original in TAKEN or not _known(original):
        return

    @functools.wraps(original)
    def load_balancing_loss(
        gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Tensor | None:
        call: Any = running()
        if call is None:
            return original(gate_logits, num_experts, top_k, attention_mask)
        return None if call.cached else router_sums(gate_logits, num_experts, top_k, call.present)

    scope[FUNCTION] = load_balancing_loss
    TAKEN.add(load_balancing_loss)


def _scope(model: PreTrainedModel) -> dict[str, Any]:
    """Return the globals of the module in which the model's forward is written."""
    return inspect.unwrap(type(model).forward).__globals__


def _known(function: Any) -> bool:
    """Return True if ``function`` computes aux by the module's formula, compared on random logits, with and without padding."""
    generator = torch.Generator().manual_seed(0)
    logits = tuple(4 * torch.randn(6, 5, generator=generator) for _ in range(3))
    present = torch.tensor([[1, 1, 0], [1, 0, 1]])
    try:
        for mask, counted in ((None, torch.ones_like(present)), (present, present)):
            got, want = function(logits, 5, 2, mask), over_all(router_sums(logits, 5, 2, counted.bool()), None)
            if not math.isclose(float(got), float(want), rel_tol=1e-5):
                return False
    except Exception:  # any error of a function with other arguments
        return False
    return True


def router_sums(logits: tuple[Tensor, ...], experts: int, top_k: int, present: Tensor) -> Tensor:
    """Return this rank's sums over tokens and layers, [2 experts + 1]: each expert's tokens, its probabilities, and all tokens.
    All tokens count once per layer. ``logits``: [tokens, experts] of each layer. ``present``: bool [batch, local], False for
    padding."""
    device, dtype = logits[0].device, torch.promote_types(logits[0].dtype, torch.float32)
    counted = present.flatten().to(device)
    assigned = torch.zeros(experts, dtype=torch.int64, device=device)
    probabilities = torch.zeros(experts, dtype=dtype, device=device)
    for of_layer in logits:
        p = of_layer.to(device).softmax(-1)
        chosen = p.detach().topk(top_k, -1).indices
        assigned = assigned.scatter_add(0, chosen.flatten(), counted.repeat_interleave(top_k).long())
        probabilities = probabilities + p.to(dtype).masked_fill(~counted[:, None], 0).sum(0)
    return torch.cat([assigned.to(dtype), probabilities, (counted.sum() * len(logits)).to(dtype)[None]])


def over_all(sums: Tensor, group: Group) -> Tensor:
    """All-reduce the ranks' ``router_sums``. Return the auxiliary loss, a scalar, with the gradient of this rank's tokens."""
    experts, total = len(sums) // 2, sums.detach().clone()
    if ranks_of(group) > 1:
        dist.all_reduce(total, group=group)
    assigned, probabilities, tokens = total[:experts], total[experts:-1], total[-1]
    aux = experts * (assigned / tokens * (sums[experts:-1] / tokens)).sum()
    with torch.no_grad():
        aux.copy_(experts * (assigned / tokens * (probabilities / tokens)).sum())
    return aux


def with_routers(
    model: PreTrainedModel, sums: Tensor, loss: Tensor | None, group: Group, factor: int
) -> dict[str, Tensor | None]:
    """Return the output's ``aux_loss``, over all ranks, and ``loss`` plus ``coefficient(model) * aux_loss``, or None without
    labels. ``sums``: this rank's ``router_sums``. ``factor``: the backward multiplies the gradient of the auxiliary loss by it.
    """
    if sums.ndim != 1:
        raise _unknown(model)
    aux = over_all(sums, group)
    if factor > 1 and aux.requires_grad:
        aux.register_hook(lambda gradient: gradient * factor)
    return {"aux_loss": aux, "loss": None if loss is None else loss + coefficient(model) * aux.to(loss.device)}


def coefficient(model: PreTrainedModel) -> float:
    """Return the factor of the auxiliary loss in the model's loss. Raise ValueError if the model has none."""
    for holder in (model, model.config.get_text_config()):
        for name in COEFFICIENTS:
            if hasattr(holder, name):
                return float(getattr(holder, name))
    raise _unknown(model)


def check_routers(model: PreTrainedModel, call_arguments: dict[str, Any], cached: bool) -> None:
    """Raise ValueError if a call requests the routers' auxiliary loss, and the loss cannot be computed. Calls with a cache have
    no loss: a request in the call is refused, one in the config is not."""
    config, asked = model.config, call_arguments.get("output_router_logits")
    in_config = any(getattr(c, "output_router_logits", False) for c in (config, config.get_text_config()))
    if not (in_config if asked is None else asked):
        return
    if _scope(model).get(FUNCTION) not in TAKEN:
        raise _unknown(model)
    coefficient(model)
    why = None
    if cached and asked:
        why = "a cache, whose call has no loss"
    elif "tree" in call_arguments:
        why = "a tree, in which several rollouts share tokens that the auxiliary loss would count once"
    elif call_arguments.get("fused_lm_head"):
        why = "fused_lm_head, whose output has no auxiliary loss"
    elif call_arguments.get("return_dict") is False:
        why = "return_dict=False, whose tuple has the auxiliary loss in the place of logits"
    if why is not None:
        raise ValueError(f"{type(model).__name__} got output_router_logits=True together with {why}: leave one of them out")


def _unknown(model: PreTrainedModel) -> ValueError:
    """Return the error for a model without an auxiliary loss or its factor, or with a formula other than this module's."""
    return ValueError(
        f"{type(model).__name__} got output_router_logits=True, in its config or its call, and computes no auxiliary loss of "
        f"routers that sequence_parallel knows: it knows that of transformers' {FUNCTION}. Set output_router_logits=False"
    )
