"""The loss over the labels of all ranks, and the auxiliary loss of mixture-of-experts models over the tokens of all ranks.

The auxiliary loss balances the load of experts:

    aux = E sum_e f_e p_e      E: the number of experts
    f_e                        the number of tokens assigned to expert e, divided by the number of tokens
    p_e                        the router's probability of expert e (the softmax of its logits), averaged over the tokens

The means are over the tokens of all layers, without padding (Switch Transformer, arXiv:2101.03961, equations 4 to 6). aux is a
product of means, so averaging the aux of each shard over the ranks would give another number. In calls without a cache the
model's ``load_balancing_loss_func`` therefore returns the sums over this rank's tokens, and ``with_loss`` adds them over the
ranks. f_e has no gradient. The gradient of p_e stays on the rank that holds the token.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ring_attn_core.model.chunks import check_chunk

from ..data.gather import gather
from ..ring.groups import Group, is_dtensor, ranks_of
from ..training.cross_entropy import sum_of_hidden
from ..training.gradients import means_of_rings
from ..training.loss import labels_of, over_ranks
from ..training.loss import loss as loss_of
from .masks import CallArguments, running
from .models import row_head_remedy
from .shards import GlobalBatch

PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
"""The fields of trl's output that have one number per token."""

FUNCTION = "load_balancing_loss_func"

TAKEN: set[Any] = set()

COEFFICIENTS = "router_aux_loss_coef", "aux_loss_coef"
"""Names of the factor of the auxiliary loss, an attribute of a model or of its text part's config."""


def with_loss(model: PreTrainedModel, output: Any, batch: GlobalBatch, gather_logits: bool, factor: int) -> Any:
    """Return ``output`` with the loss over all ranks' labels, and global logits if asked. ``factor``: scales the gradient."""
    fields = dict(output) if isinstance(output, ModelOutput) else None
    name = next((name for name in ("logits", "last_hidden_state") if fields and name in fields), None)
    result = fields[name] if fields is not None and name else output if isinstance(output, Tensor) else output[0]
    if batch.summed_vocab is None and result.shape[:2] != (batch.batch, len(batch.index)):
        which = f"{type(model).__name__}, which returns {list(result.shape)},"
        raise ValueError(f"the head of {which} {row_head_remedy(model)}")
    changed: dict[str, Tensor | None] = {}
    if batch.labels is not None:
        changed["loss"] = _loss(result, batch.labels, batch, factor)
    if fields is not None and fields.get("aux_loss") is not None:
        if fields["aux_loss"].ndim != 1:
            raise _unknown(model)
        changed["aux_loss"] = aux = _scale(over_all(fields["aux_loss"], batch.ring.group), factor)
        if (loss := changed.get("loss")) is not None:
            changed["loss"] = loss + coefficient(model) * aux.to(loss.device)
    if fields is not None and fields.get("pooler_output") is not None:
        changed["pooler_output"] = None  # it would be that of a shard's first token
    if batch.summed_vocab is not None:
        result = None
    elif gather_logits:
        result = gather(result, group=batch.ring.group, layout=batch.ring.layout, length=batch.length)
    if fields is None:
        return result if isinstance(output, Tensor) else (*changed.values(), result, *output[1:])
    return type(output)(**{**fields, **changed, **({name: result} if name else {})})


def _loss(result: Tensor, labels: Tensor, batch: GlobalBatch, factor: int) -> Tensor:
    group, ignored, reduction = batch.ring.group, batch.ignore_index, "mean" if batch.divisor is None else "sum"
    if batch.summed_vocab is not None:
        tokens = labels_of(labels, ignored, 1, batch.label_weights, result.dtype)
        total = over_ranks(result.reshape(()), tokens, group, reduction, batch.summed_vocab)
    else:
        options: dict[str, Any] = {"label_weights": batch.label_weights, "group": group, "ignore_index": ignored}
        total = loss_of(result, labels, reduction=reduction, **options)
    return _divide(total, batch, factor)


def _divide(total: Tensor, batch: GlobalBatch, factor: int) -> Tensor:
    """Divide by ``num_items_in_batch``, scale the gradient by ``factor``, and note an unscaled mean for :func:`sum_gradients`."""
    model, group, divisor = batch.model, batch.ring.group, batch.divisor
    if divisor is not None:
        total = total / (divisor.to(total.device) if isinstance(divisor, Tensor) else divisor)
    if total.requires_grad and model is not None and dist.is_initialized() and batch.ring.ranks < dist.get_world_size():
        ranks = {dist.get_rank()} if group is None else set(dist.get_process_group_ranks(group))

        def note(gradient: Tensor) -> None:
            means_of_rings.pop(model, None)
            if divisor is None and gradient.item() == 1:
                means_of_rings[model] = ranks

        total.register_hook(note)
    return _scale(total, factor)


def _scale(loss: Tensor, factor: int) -> Tensor:
    """Make the backward multiply the gradient of ``loss`` by ``factor``, and return ``loss``."""
    if factor > 1 and loss.requires_grad:
        loss.register_hook(lambda gradient: gradient * factor)
    return loss


def with_log_probs(output: Any, batch: GlobalBatch, factor: int) -> Any:
    """Return the output of trl's head with the loss over all ranks' labels, and each ``PER_TOKEN`` field gathered in natural
    order. It has ``length - 1`` tokens with labels, ``length`` with shift_labels. Gradients of gathered fields sum over ranks to
    the gradient on one device times the number of ranks."""
    assert batch.labels is not None
    ring, end = batch.ring, batch.length - 1 if batch.shifted else batch.length
    wide = lambda x: gather(x, group=ring.group, layout=ring.layout, length=batch.length)[:, :end]
    fields = {name: x if x is None or name not in PER_TOKEN else wide(x) for name, x in vars(output).items()}
    labels = labels_of(batch.labels, batch.ignore_index, 1, None, output.log_probs.dtype)
    total = over_ranks(-output.log_probs.sum(), labels, ring.group, "mean" if batch.divisor is None else "sum")
    return type(output)(**{**fields, "loss": _divide(total, batch, factor)})


class ChunkedHead:
    """The head of ``model``, which inside ``summing`` returns a sum of cross-entropies, ``chunk`` tokens at a time."""

    def __init__(self, model: PreTrainedModel, chunk: int) -> None:
        check_chunk("loss_chunk", chunk)
        self.model, self.chunk, name = model, chunk, type(model).__name__
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or tuple(head.weight.shape) != (head.out_features, head.in_features):
            kind = type(head)
            adapter = kind.__module__.startswith("peft.")
            raise ValueError(
                f"loss_chunk computes logits from hidden states and the matrix of the model's head, and the head of {name} is "
                f"{kind.__name__} of {'PEFT, with an adapter of its own' if adapter else kind.__module__}: leave loss_chunk out"
                f"{', or the head out of target_modules and modules_to_save' if adapter else ''}"
            )
        if head.bias is not None:
            raise ValueError(f"loss_chunk knows heads that are a matrix alone, and that of {name} has a bias: leave it out")
        self.linear = head

    @contextmanager
    def summing(self, batch: GlobalBatch, labels: Tensor) -> Iterator[None]:
        """Make the head return the summed loss of ``labels`` as a tensor [1, 1, 1], inside this ``with``."""
        made: list[Tensor] = []
        batch.summed_vocab = self.linear.out_features

        def forward(hidden: Tensor) -> Tensor:
            if hidden.shape[:-1].numel() != labels.numel():
                raise ValueError(
                    f"{type(self.model).__name__} computes logits of {hidden.shape[:-1].numel()} of {labels.numel()} tokens, "
                    "so loss_chunk cannot compute their loss: leave it out"
                )
            if is_dtensor(self.linear.weight):
                raise ValueError(
                    "the head's weight is a DTensor in the middle of the forward: loss_chunk takes heads that FSDP2 has gathered "
                    "by then, and no tensor parallel ones; leave it out"
                )
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            tokens = labels_of(labels, batch.ignore_index, self.chunk, batch.label_weights, dtype)
            made.append(sum_of_hidden(hidden.flatten(0, -2), self.linear.weight, tokens)[0].view(1, 1, 1))
            return made[-1]

        def check(_: nn.Module, __: Any, output: Any) -> None:
            logits = output["logits"] if isinstance(output, dict) else output[0]
            if not made or logits is not made[-1]:
                raise ValueError(
                    f"{type(self.model).__name__} computes something of its logits after its head, as a softcap or a scale: "
                    "leave loss_chunk out, which never has them whole"
                )

        before = self.linear.__dict__.get("forward")
        self.linear.forward = forward  # type: ignore[method-assign]
        try:
            with self.model.register_forward_hook(check, prepend=True):
                yield
        finally:
            del self.linear.forward
            if before is not None:
                self.linear.forward = before


def take_over(model: PreTrainedModel) -> None:
    """Replace the ``load_balancing_loss_func`` of the model's module for the process, if it is the formula of this module."""
    scope = _scope(model)
    original = scope.get(FUNCTION)
    if original is None or original in TAKEN or not _is_known(original):
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
    return inspect.unwrap(type(model).forward).__globals__


def _is_known(function: Any) -> bool:
    """Return True if ``function`` computes aux by the module's formula, compared on random logits, with and without padding."""
    generator = torch.Generator().manual_seed(0)
    logits = tuple(4 * torch.randn(6, 5, generator=generator) for _ in range(3))
    present = torch.tensor([[1, 1, 0], [1, 0, 1]])
    aux = lambda counted: float(over_all(router_sums(logits, 5, 2, counted.bool()), None))
    same = lambda mask, want: math.isclose(float(function(logits, 5, 2, mask)), want, rel_tol=1e-5)
    try:
        return same(None, aux(torch.ones_like(present))) and same(present, aux(present))
    except Exception:  # any error of a function with other arguments
        return False


def router_sums(logits: tuple[Tensor, ...], experts: int, top_k: int, present: Tensor) -> Tensor:
    """Return this rank's sums over tokens and layers, [2 experts + 1]: each expert's tokens and probabilities, and all tokens."""
    device, dtype = logits[0].device, torch.promote_types(logits[0].dtype, torch.float32)
    counted = present.flatten().to(device)
    assigned, probabilities = (torch.zeros(experts, dtype=kind, device=device) for kind in (torch.int64, dtype))
    for layer_logits in logits:
        p = layer_logits.to(device).softmax(-1)
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


def coefficient(model: PreTrainedModel) -> float:
    for holder in (model, model.config.get_text_config()):
        for name in COEFFICIENTS:
            if hasattr(holder, name):
                return float(getattr(holder, name))
    raise _unknown(model)


def check_routers(call: CallArguments) -> None:
    """Raise ValueError if a call requests an auxiliary loss that it cannot have. In calls with a cache a config may."""
    model, config, asked = call.model, call.model.config, call.by_name.get("output_router_logits")
    in_config = any(getattr(c, "output_router_logits", False) for c in (config, config.get_text_config()))
    if not (in_config if asked is None else asked):
        return
    if _scope(model).get(FUNCTION) not in TAKEN:
        raise _unknown(model)
    coefficient(model)
    refused = {
        "a cache, whose call has no loss": call.cache is not None and asked,
        "a tree, in which several rollouts share tokens that the auxiliary loss would count once": "tree" in call.by_name,
        "fused_lm_head, whose output has no auxiliary loss": call.by_name.get("fused_lm_head"),
        "return_dict=False, whose tuple has the auxiliary loss in the place of logits": call.by_name.get("return_dict") is False,
    }
    if why := next((why for why, is_set in refused.items() if is_set), None):
        raise ValueError(f"{call.name} got output_router_logits=True together with {why}: leave one of them out")


def _unknown(model: PreTrainedModel) -> ValueError:
    return ValueError(
        f"{type(model).__name__} got output_router_logits=True, in its config or its call, and computes no auxiliary loss of "
        f"routers that sequence_parallel knows: it knows that of transformers' {FUNCTION}. Set output_router_logits=False"
    )
