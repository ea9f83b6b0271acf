"""The mask function ``ring_mask`` for transformers, and the running call with its documents and padding.

A model describes its mask as a function of positions. ``fits`` recognizes one of the patterns below by samples of position pairs,
and ``ring_mask`` returns a band and at most one interval of keys per query, but no array of tokens by tokens. With 6 tokens (rows
are queries, columns keys, # may be attended), W = 2 and chunks of 3:

    full      causal    window    both      chunks
    ######    #.....    #.....    ###...    #.....
    ######    ##....    ##....    ####..    ##....
    ######    ###...    .##...    #####.    ###...
    ######    ####..    ..##..    .#####    ...#..
    ######    #####.    ...##.    ..####    ...##.
    ######    ######    ....##    ...###    ...###

A causal window of W includes the token itself: q - k < W. A two-sided window excludes it: |q - k| <= W.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from ring_attn_core.masks import causal, full, sliding_window
from ring_attn_core.problem.strategies import Strategy
from ring_attn_core.runs import Band

from ..ring.groups import ranks_of, ring_of

NAME = "ring"

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A mask function of transformers: (batch row, head, q_pos, k_pos) -> bool, broadcast."""


class CallRing(NamedTuple):
    """The ring of a model: arguments of ring_attention. A call with ``layout`` "balanced" makes a copy with a BalancedLayout."""

    group: dist.ProcessGroup | None = None
    layout: Any = "zigzag"
    strategy: Strategy = "auto"
    backend: str = "auto"
    order: str = "ring"

    @property
    def ranks(self) -> int:
        return ranks_of(self.group)


class CallArguments(NamedTuple):
    """The arguments of a call of ``model`` over ``ring``. ``by_name``: those that are not None. ``tokens``: ids [batch, length]
    or embeddings [batch, length, dim]. ``cache``: a RingCache, or None. ``seed``: of attention's dropout."""

    model: PreTrainedModel
    ring: CallRing
    by_name: dict[str, Any]
    tokens: Tensor
    cache: Any = None
    seed: int | None = None

    name = property(lambda self: type(self.model).__name__)
    shape = property(lambda self: tuple(self.tokens.shape[:2]))


class Pattern(NamedTuple):
    """A band of keys. If ``chunk`` is not 0, a query sees only keys in its own chunk of ``chunk`` tokens."""

    band: Band
    chunk: int = 0

    def visible(self, q: Tensor, k: Tensor) -> Tensor:
        lag, lo, hi = q - k, self.band.lo, self.band.hi
        inside = torch.ones_like(lag, dtype=torch.bool) if lo is None else lag >= lo
        inside = inside if hi is None else inside & (lag <= hi)
        return inside & (q // self.chunk == k // self.chunk) if self.chunk else inside


class LayerMask(NamedTuple):
    """The mask of one kind of layer, such as those with a window, for this rank's tokens. The layers get it as attention_mask."""

    ring: CallRing
    band: Band
    length: int
    extents: Tensor | None = None
    key_mask: Tensor | None = None
    offsets: Tensor | None = None
    """``int64`` [1 or batch, seq_local], the position of each token in its document, tree path or unpacked row."""
    dropout_seed: int | None = None
    cached: RunningCall | None = None  # the CachedCall whose cache the layers continue
    key_extents: Tensor | None = None

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple):
            raise ValueError(
                'a layer reads its attention_mask as a tensor [batch, 1, tokens, tokens], which attn_implementation="ring" never '
                "makes: such a model runs with another attn_implementation, unsharded"
            )
        return tuple.__getitem__(self, key)

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        """Raise ValueError, because torch got this mask: a layer has run outside of the ``with`` that made the mask."""
        raise ValueError(
            "a layer of a call made inside sequence_parallel runs outside of it, as when activation checkpointing recomputes it: "
            "call backward inside the with as well"
        )


class NoWindow(NamedTuple):
    """The mask of layers with an invalid window, ``size`` < 1. Some models request such a mask although no layer uses it."""

    size: int


@dataclass(eq=False, kw_only=True)
class RunningCall(ABC):
    """A call of a model in progress, with its ``kwargs`` on this rank: a ``GlobalBatch`` or, with a cache, a ``CachedCall``."""

    device: torch.device
    kwargs: dict[str, Any] = field(default_factory=dict)
    longest: Tensor | None = None
    """The largest of the global position_ids, as a 0-d tensor; a shard may lack it. None if every rank computes all tokens."""
    model: nn.Module | None = None
    wrapped: bool = False
    """True if the hooks of the wrapper around ``model`` began the call."""
    scope: ExitStack = field(default_factory=ExitStack)
    """The callbacks that undo the call's changes to the model; they run when the call ends."""
    attention_calls: int = 0
    """The number of calls of ``ring_attention_forward`` so far, without those in compiled graphs."""
    cached: ClassVar[bool] = False

    @abstractmethod
    def begin(self, model: PreTrainedModel) -> None:
        """Prepare ``model`` and its cache for the call. Add callbacks to ``scope`` that undo the changes when the call ends."""

    @abstractmethod
    def mask_of(self, pattern: Pattern) -> LayerMask:
        """Return the mask, in this call, of the layers that have ``pattern``."""


_running: ContextVar[RunningCall | None] = ContextVar("ring_attn_model_call", default=None)
_traced = threading.local()
"""The running call of each thread, for torch.compile: up to torch 2.13 it cannot trace the read of a ContextVar."""


@contextmanager
def during(call: RunningCall) -> Iterator[None]:
    outer, token = _running.get(), _running.set(call)
    _traced.call = call
    try:
        yield
    finally:
        _running.reset(token)
        _traced.call = outer


def running() -> RunningCall | None:
    return getattr(_traced, "call", None) if torch.compiler.is_compiling() else _running.get()


def ring_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    config: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **others: Any,
) -> LayerMask | NoWindow:
    """Return the mask of one kind of layer, or NoWindow if ``local_size`` < 1. Functions such as create_causal_mask call it.

    Raise ValueError if the mask fits no pattern of this file. Under torch.compile, inside ``sequence_parallel``,
    the likeliest pattern is taken without samples. Outside of it, on one rank, any
    mask with one interval of keys for each query is accepted.
    """
    offset, call = others.get("q_offset", 0), running()
    cached = call is not None and call.cached  # such a call reports kv_length as if its cache were empty
    if kv_length != q_length or (isinstance(offset, int) and offset != 0 and not cached) or others.get("kv_offset", 0):
        raise ValueError(
            f'attn_implementation="ring" got {q_length} queries and {kv_length} keys: cross attention and '
            "caches of other kinds do not run over a ring. Generate inside sequence_parallel, which keeps a cache of its own, "
            "without cache, past_key_values, cache_implementation and use_cache"
        )
    if local_size is not None and local_size < 1:
        return NoWindow(local_size)
    tried = candidates(local_size, "allow_is_bidirectional_skip" in others, getattr(config, "attention_chunk_size", None))
    if call is None:
        mask = _on_one_device(mask_function, attention_mask, tried, local_size, (others["batch_size"], q_length))
    elif torch.compiler.is_compiling():
        mask = None if others.get("use_vmap") else call.mask_of(tried[0])
    else:
        found = (call.mask_of(p) for p in tried if fits(p, mask_function, local_size, q_length, call.device))
        mask = next(found, None)
    if mask is None:
        raise ValueError(
            f'attn_implementation="ring" does not know a mask of {type(config).__name__}: it is neither causal nor full '
            "nor a window nor chunks, perhaps with blocks or a prefix of its own. Such models run unsharded, with another "
            "attn_implementation"
        )
    return mask


def check_alone() -> None:
    """Raise ValueError if the default group has several ranks. Called outside ``sequence_parallel``, where nothing is sharded."""
    if ranks_of(ring_of(None)) > 1:
        raise ValueError(
            'attn_implementation="ring" was called outside of sequence_parallel on a group of several ranks: write "with '
            'ring_attn_torch.transformers.sequence_parallel(model):" around model(...), which shards whole input_ids, labels, '
            "attention_mask and position_ids; a forward that is not called through model(...) does not run in it, nor does "
            "another model that was made inside, of model.config: make that before you enter"
        )


def _on_one_device(
    function: MaskFunction, attention_mask: Tensor | None, tried: list[Pattern], size: int | None, shape: tuple[int, int]
) -> LayerMask | None:
    """Return the mask of a call outside of ``sequence_parallel``, or None. ``shape``: [batch, tokens]."""
    check_alone()
    (batch, tokens), ring = shape, CallRing(ring_of(None), "contiguous")
    device = torch.device("cpu") if attention_mask is None else attention_mask.device
    key_mask = None if attention_mask is None else attention_mask[:, :tokens].bool()
    for pattern in tried:
        if not pattern.chunk and fits(pattern, function, size, tokens, device, batch):
            return LayerMask(ring, pattern.band, tokens, None, key_mask)
    extents = intervals(function, batch, tokens, device)
    if extents is None:
        return None
    ahead = bool((extents[..., 1] > torch.arange(1, tokens + 1, device=device)).any())
    return LayerMask(ring, full() if ahead else causal(), tokens, extents, key_mask)


def candidates(size: int | None, both_sides: bool, chunk_size: int | None) -> list[Pattern]:
    """Return the patterns of a mask, likeliest first. ``size``: tokens of its window, or chunk if it equals ``chunk_size``."""
    if size is None:
        return [Pattern(full() if both_sides else causal())]
    if both_sides:
        return [Pattern(sliding_window(size, after=size))]
    window, chunks = Pattern(sliding_window(size - 1)), Pattern(causal(), size)
    return [chunks, window] if size == chunk_size else [window, chunks]


def fits(pattern: Pattern, function: MaskFunction, size: int | None, tokens: int, device: torch.device, rows: int = 1) -> bool:
    """Return True if ``function`` equals ``pattern`` on sampled pairs of positions < ``tokens``, in the first ``rows`` sequences.

    The sample pairs each query with its neighbours, the first token and the tokens at the edge of a window of ``size``, to
    detect documents, blocks and prefixes, and with 8 evenly spread keys, to detect holes of an eighth of the tokens. It also has
    all pairs among the tokens near the first three multiples of ``size`` and the first and last token, for windows and chunks.
    """
    every = torch.arange(tokens, device=device)
    near = [every - 1, every, every + 1, every * 0, every - (size or 1), every - (size or 1) - 1]
    near = torch.cat([*near, *((every + i * tokens // 8) % tokens for i in range(8))])
    edge = torch.arange(-2, 3)
    around = torch.cat([edge, *(edge + i * (size or 0) for i in (1, 2, 3)), edge + tokens - 1]).clamp(0, tokens - 1).unique()
    around = around.to(device)
    q = torch.cat([every.repeat(len(near) // tokens), around.repeat_interleave(len(around))]).expand(rows, -1)
    k = torch.cat([near.clamp(0, tokens - 1), around.repeat(len(around))]).expand(rows, -1)
    b = torch.arange(rows, device=device)[:, None].expand_as(q)
    return bool((function(b, torch.zeros_like(b), q, k) == pattern.visible(q, k)).all())


def intervals(function: MaskFunction, batch: int, tokens: int, device: torch.device) -> Tensor | None:
    """Return each query's interval of visible keys, int32 [batch, tokens, 2], or None if some query has none that contains it.
    Bisection finds its ends; then keys beside and halfway to each end and 8 evenly spread keys are checked. All global tokens are
    evaluated, so only rings of one rank call this."""
    b = torch.arange(batch, device=device)[:, None].expand(batch, tokens)
    q = torch.arange(tokens, device=device).expand(batch, tokens)
    sees = lambda k: function(b, torch.zeros_like(b), q, k.clamp(0, tokens - 1)) & (k >= 0) & (k < tokens)
    if not bool(sees(q).all()):
        return None
    first, below = q.clone(), torch.full_like(q, -1)  # first is visible, below is not
    end, last = torch.full_like(q, tokens), q.clone()  # last is visible, end is not
    for _ in range(tokens.bit_length() + 1):
        middle = (first + below) // 2
        inside, open_ = sees(middle), first - below > 1
        first, below = torch.where(open_ & inside, middle, first), torch.where(open_ & ~inside, middle, below)
        middle = (last + end) // 2
        inside, open_ = sees(middle), end - last > 1
        last, end = torch.where(open_ & inside, middle, last), torch.where(open_ & ~inside, middle, end)
    whole = sees((first + q) // 2) & sees((last + q) // 2) & ~sees(first - 1) & ~sees(end)
    for k in ((q + i * tokens // 8) % tokens for i in range(8)):
        whole &= sees(k) == ((first <= k) & (k < end))
    return torch.stack([first, end], -1).int() if bool(whole.all()) else None
