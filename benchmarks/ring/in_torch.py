"""The calls of one rank in PyTorch: our strategies, and torch's context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ring_attn_torch import ring_attention
from ring_attn_torch.ring.strategies import ring as of_ring
from ring_attn_torch.ring.transfer import Transfer

from ..support.turns import Work, take_turns
from .problem import ALONE, STILL, Call, Problem, rates

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Rank:
    """The candidates of a call on this rank. ``errors``: the relative difference of each candidate's out from the first's."""

    def __init__(self, call: Call, problem: Problem, device: torch.device) -> None:
        self.call, self.device, self.dtype = call, device, getattr(torch, problem.dtype)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.alone: Any = [dist.new_group([rank]) for rank in range(self.ranks)][self.rank]
        self.works: dict[str, Work] = {}
        self.flops = {}
        self.errors: dict[str, float] = {}
        self.first: Tensor | None = None

    def tensors(self, tokens: int, seed: int) -> list[Tensor]:
        """Draw q, k, v and the cotangent of out."""
        call, generator = self.call, torch.Generator(self.device).manual_seed(seed)
        heads = (call.heads, call.kv_heads, call.kv_heads, call.heads)
        make = lambda heads: torch.randn(1, tokens, heads, call.dim, device=self.device, generator=generator)
        return [make(each).to(self.dtype) for each in heads]

    def add(
        self,
        name: str,
        attend: Attend,
        tensors: list[Tensor],
        work: Call | None = None,
        alike: bool = True,
        heads_first: bool = False,
    ) -> None:
        """Add ``attend`` as a candidate. If ``alike``, compare its out with that of the first candidate."""
        *leaves, dout = tensors
        for x in leaves:
            x.requires_grad_()
        out = attend(*leaves)
        plain = [x.detach() for x in leaves]
        self.works[f"{name} forward"] = torch.no_grad()(lambda: attend(*plain))
        self.works[f"{name} backward"] = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
        self.flops[name] = work.flops(1) if work else self.call.flops(self.ranks)
        if alike:
            found = (out.transpose(1, 2) if heads_first else out).detach().float()
            self.first = found if self.first is None else self.first
            self.errors[name] = ((found - self.first).norm() / self.first.norm()).item()


def ours(rank: Rank, problem: Problem) -> None:
    """Add our strategies, the ring without transfers, and one launch of equal work."""
    call, tensors = rank.call, rank.tensors(rank.call.tokens, rank.rank)
    extents = call.extents(rank.ranks)
    here = call.plan(rank.ranks).positions(rank.rank)
    given = (
        {} if extents is None else {"extents": torch.tensor([[extents[i] for i in here]], dtype=torch.int32, device=rank.device)}
    )
    attend = partial(ring_attention, mask=call.band, layout=call.layout_of(rank.ranks), **given)
    for name, strategy in problem.strategies(call, rank.ranks, rank.device.type == "cuda").items():
        rank.add(name, partial(attend, strategy=strategy), tensors)
    rank.add(STILL, partial(attend, strategy="ring"), tensors, alike=False)
    for each in ("forward", "backward"):
        rank.works[f"{STILL} {each}"] = without_transfers(rank.works[f"{STILL} {each}"])
    tokens = call.alone(rank.ranks)
    same = call._replace(tokens=tokens, mask="causal" if call.mask == "documents" else call.mask)
    lone = partial(ring_attention, mask=same.band, group=rank.alone)
    rank.add(ALONE, lone, rank.tensors(tokens, rank.rank), same, alike=False)


def without_transfers(work: Work) -> Work:
    """Return ``work`` with each transfer replaced: a rank receives its own arrays instead of another rank's."""

    def still() -> Any:
        with mock.patch.object(of_ring, "send", lambda arrays, hop, group: Transfer(arrays, arrays)):
            return work()

    return still


@contextmanager
def context_parallel(rank: Rank) -> Iterator[None]:
    """Add torch's context parallelism by all-gather and by all-to-all; inside the ``with``, its attention is patched in."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as parallel
    from torch.distributed.tensor.experimental._attention import _cp_options, set_rotate_method

    call, device = rank.call, rank.device
    mesh = init_device_mesh(device.type, (rank.ranks,))
    _cp_options.enable_load_balance = True
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in rank.tensors(call.tokens, rank.rank))
    k, v = (x.repeat_interleave(call.heads // call.kv_heads, 1) for x in (k, v))  # it takes no grouped heads: not timed
    whole = torch.zeros(1, 1, call.tokens * rank.ranks, 1, device=device)

    def attend(method: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        set_rotate_method(method)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with parallel(mesh, buffers=[whole], buffer_seq_dims=[2]):
        for method in ("allgather", "alltoall"):
            rank.add(f"torch context_parallel, {method}", partial(attend, method), [q, k, v, dout], heads_first=True)
        yield


def run(problem: Problem, device: torch.device) -> list[dict[str, Any]]:
    """Return the rows of all calls."""
    found: list[dict[str, Any]] = []

    def slowest(seconds: float) -> float:
        longest = torch.tensor(seconds, device=device, dtype=torch.float32)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return longest.item()

    for fields in problem.calls:
        call = Call(*fields)  # type: ignore[arg-type]
        rank = Rank(call, problem, device)
        ours(rank, problem)
        with ExitStack() as stack:
            if problem.peers and call.mask == "causal" and device.type == "cuda":  # torch's refuses masks that are not causal
                stack.enter_context(context_parallel(rank))
            seconds = take_turns(rank.works, problem.rounds, slowest=slowest)
        rows = rates(seconds, rank.flops)
        found += [{"call": str(call), **row, "beside the ring": rank.errors.get(str(row["candidate"]), 0.0)} for row in rows]
    return found
