"""What does it cost to cut the launch of "gather" into groups of heads, without any transfer?

    python -m benchmarks.heads [--cpu] [--tokens 2048 8192] [--ranks 2] [--heads 64] [--kv-heads 8] [--groups 1 2 4 8]

One GPU, bfloat16, causal, zigzag, heads of 128. Rank 0 of a ring runs the passes of ``Gather(groups=n)``: it cuts heads, launches
the kernels for heads / n, and copies their results into one array. Arrays that would arrive are there, with random values. One
group is "gather" itself. "one launch of equal work" is a sequence on one rank with as many visible pairs.

Prediction: at 8,192 tokens four groups take at most 3 % more than one, since a launch still has some 1,000 tiles of queries; at
2,048 tokens two groups lose 5 % or more.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ring_attn_core import Gather
from ring_attn_core.problem.options import Options
from ring_attn_torch.attend.state import State
from ring_attn_torch.call.decide import compile_call
from ring_attn_torch.call.prepare import Arrays, problem_of
from ring_attn_torch.ring import by_heads, loop
from ring_attn_torch.ring.strategies import gather
from ring_attn_torch.ring.transfer import Transfer

from ..ring.problem import ALONE, Call, rates
from ..support import harness
from ..support.turns import Work, take_turns

_arrays: dict[Any, Tensor] = {}


def passes(call: Call, ranks: int, groups: int, device: str) -> dict[str, Work]:
    """Return a forward and a backward of rank 0."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    heads = (call.heads, call.kv_heads, call.kv_heads, call.heads)
    q, k, v, dout = (torch.randn(1, call.tokens, each, call.dim, device=device).to(dtype) for each in heads)
    strategy = Gather(groups=groups) if ranks > 1 else "auto"
    options = Options(mask=call.band, layout=call.layout, strategy=strategy)
    decision = compile_call(problem_of(q, k, v, arrays := Arrays(), ranks, options), any_position=False)
    back = decision.backward
    inputs = [(each.pack_keys(k, v, arrays), each.score_with(arrays), each.ring(None), each.backend) for each in (decision, back)]
    total = loop.forward(q, *inputs[0])
    dtotal = State(dout, torch.zeros_like(total.lse))
    return {
        "forward": lambda: loop.forward(q, *inputs[0]),
        "backward": lambda: loop.backward(q, inputs[1][0], total, dtotal, *inputs[1][1:]),
    }


def there(arrays: Any, ranks: int) -> Transfer:
    """Return a transfer that is over, of arrays of all ranks."""
    for x in arrays:
        if x is not None and (x.shape, x.dtype) not in _arrays:
            _arrays[x.shape, x.dtype] = torch.randn(ranks, *x.shape, device=x.device).to(x.dtype)
    return Transfer(tuple(None if x is None else _arrays[x.shape, x.dtype] for x in arrays), arrays)


def rows(options: Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rate of each number of groups."""
    device, ranks = "cpu" if options.cpu else "cuda", options.ranks
    gathers = lambda arrays, group: there(arrays, ranks)
    still = {"all_gather": gathers, "exchange": lambda arrays, first, group: Transfer(arrays, arrays)}
    for tokens in options.tokens:
        call = Call(tokens, options.heads, options.kv_heads, "causal")
        alone = call._replace(tokens=call.alone(ranks))
        with patch.multiple(by_heads, **still), patch.multiple(gather, **still), torch.no_grad():
            works = {f"{n} groups": passes(call, ranks, n, device) for n in options.groups}
            works[ALONE] = passes(alone, 1, 1, device)
            flat = {f"{name} {each}": work for name, of in works.items() for each, work in of.items()}
            seconds = take_turns(flat, options.rounds)
        flops = {name: (alone.flops(1) if name == ALONE else call.flops(ranks)) for name in works}
        yield from ({"call": str(call), "ranks": ranks, **row} for row in rates(seconds, flops))


if __name__ == "__main__":
    sizes: dict[str, Any] = {"tokens": (2048, 8192), "ranks": 2, "heads": 64, "kv_heads": 8, "groups": (1, 2, 4, 8)}
    options = harness.options(__doc__, **sizes, rounds=7, cpu=False, out="heads-h200")
    harness.record(__doc__, options.out, "rows", rows(options))
