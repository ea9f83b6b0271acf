"""A call of ``generate`` as one record, equal on all ranks: options, chunks of the prompts, and the size of the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from ..cache.placement import count_held
from ..cache.spec import FP8
from ..layouts import padded_local
from ..masks import sliding_window
from ..sampling import Sampling
from ..validation import in_words, is_integer
from .config import TransformerConfig
from .mixers import recurrent_layers

SLOTS = 64
"""A call's cache has a multiple of this many slots per rank, so that calls of similar length share a compiled step."""

MAX_TOKENS = 2**30

OnToken = Callable[[int, int], object]
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Generation:
    """A checked call of ``generate``. ``new``: limits by request; ``stop``: ids; ``chunk``: prompt tokens of one prefill."""

    config: TransformerConfig
    prompts: tuple[tuple[int, ...], ...]
    new: tuple[int, ...]
    sampling: Sampling
    stop: tuple[int, ...]
    chunk: int | None
    cache_dtype: str

    @classmethod
    def of(
        cls, config: TransformerConfig, dtype: str, prompts: Any, new: Any, stop: Any, chunk: Any, cache_dtype: Any, **draw: Any
    ) -> Generation:
        """Check a call's arguments and return its record. ``dtype``: the model's compute dtype. ``draw``: Sampling's fields."""
        windows_of(config)
        rows = _rows(prompts)
        for row, ids in enumerate(rows):
            if not ids:
                raise ValueError(f"prompt {row} is empty: begin it with a token, such as the tokenizer's id for a beginning")
            check_ids(ids, config.vocab, f"prompt {row} holds")
        most, stop = _most(new, len(rows)), _ids(stop)
        check_ids(stop, config.vocab, "stop holds")
        if chunk is not None and (not is_integer(chunk) or chunk < 1):
            raise ValueError(f"chunk must be an int of at least 1, tokens of a prompt in one prefill, got {in_words(chunk)}")
        if config.alibi and chunk is not None and chunk < max(map(len, rows)):
            raise ValueError(
                f"chunk={chunk} and ALiBi: what is cached lies in no order that ALiBi could count in, so prompts are prefilled "
                "whole. Leave chunk out"
            )
        if cache_dtype not in (None, dtype, FP8):
            raise ValueError(f"cache_dtype must be one of {dtype}, {FP8}, or None for {dtype}, got {in_words(cache_dtype)}")
        sampling = Sampling(**draw)
        sampling.check_requests(len(rows))
        return cls(config, rows, most, sampling, stop, chunk if chunk is None else int(chunk), cache_dtype or dtype)

    @property
    def lengths(self) -> list[int]:
        return list(map(len, self.prompts))

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def ends(self) -> list[int]:
        """Return each request's maximum number of cached tokens: prompt and new tokens but the last, which is never cached."""
        return [length + new - 1 for length, new in zip(self.lengths, self.new, strict=True)]

    def chunks(self, padded: Callable[[int], int] = int) -> list[tuple[int, list[int], int]]:
        """Return (first position, tokens from each prompt, ``padded`` size) of each chunk; an ended prompt has 0 tokens."""
        longest = max(self.lengths)
        size = min(self.chunk or longest, longest)
        counts = [(start, [min(max(n - start, 0), size) for n in self.lengths]) for start in range(0, longest, size)]
        return [(start, lengths, padded(max(lengths))) for start, lengths in counts]

    def ids(self, start: int, tokens: int) -> list[list[int]]:
        """Return each prompt's token ids at positions ``start .. start + tokens - 1``, with zeros after the prompt's end."""
        rows = (list(ids[start : start + tokens]) for ids in self.prompts)
        return [row + [0] * (tokens - len(row)) for row in rows]

    def cache(self, layout: str, ranks: int, padded: Callable[[int], int] = int) -> dict[str, Any]:
        """Return ``capacity``, ``window`` and ``room`` of ``KVCache.make``; ``padded``: as in :meth:`chunks`.
        The cache has a window if every layer has one and it then needs fewer slots: the widest window plus the largest chunk's
        tokens over all ranks. The slots of a rank are a multiple of ``SLOTS``."""
        chunks = [(lengths, padded_local(layout, ranks, tokens)) for _, lengths, tokens in self.chunks(padded)]
        slots = 0
        for row, end in enumerate(self.ends):
            shares = zip(*(count_held(layout, ranks, local, lengths[row]) for lengths, local in chunks), strict=True)
            slots = max(slots, *map(sum, shares), -(-end // ranks))
        windows = windows_of(self.config)
        if None not in windows:
            window = max(1, *windows)  # type: ignore[type-var]  # none of them is None
            room = max(local for _, local in chunks) * ranks
            if window + room < slots:
                return {"capacity": _round_up(window + room), "window": window, "room": room}
        return {"capacity": _round_up(slots) * ranks, "window": None, "room": None}

    def fingerprint(self) -> dict[str, Any]:
        """Return values that must be equal on all ranks: a digest of the prompts, and each option by name, lists as tuples."""
        digest = blake2b(repr(self.prompts).encode(), digest_size=16).hexdigest()
        parameters = self.sampling.parameters
        found = {"prompts": digest, "max_new_tokens": self.new, "stop": self.stop, "chunk": self.chunk}
        found |= {"cache_dtype": self.cache_dtype, "temperature": parameters.temperature or 0.0, "top_k": parameters.top_k}
        found |= {"top_p": parameters.top_p, "seed": int(self.sampling.seed)}
        return {name: tuple(x) if isinstance(x, list) else x for name, x in found.items()}


def answers(loop: Any, generation: Generation, on_token: OnToken | None) -> list[list[int]]:
    """Run a package's decode loop. Return the new tokens of each request; ``on_token(request, token)`` is called for each.
    ``loop``: ``read()`` returns a function that returns the newest tokens, ``step()`` draws the next, before the newest are read
    if ``ahead``."""
    stop, most = frozenset(generation.stop), max(generation.new)
    tokens: list[list[int]] = [[] for _ in generation.prompts]
    unfinished = set(range(len(tokens)))
    for number in range(1, most + 1):
        read, more = loop.read(), number < most
        if more and loop.ahead:
            loop.step()
        newest = read()
        for request in sorted(unfinished):
            token = newest[request]
            tokens[request].append(token)
            if token in stop or len(tokens[request]) == generation.new[request]:
                unfinished.remove(request)
            if on_token is not None:
                on_token(request, token)
        if not unfinished:
            break
        if more and not loop.ahead:
            loop.step()
    return tokens


def check_functions(on_token: Any, progress: Any) -> None:
    for name, function in (("on_token", on_token), ("progress", progress)):
        if function is not None and not callable(function):
            raise ValueError(f"{name} must be a function or None, got {type(function).__name__}")


def features_of(attention: Any, q: Any) -> dict[str, Any]:
    """Return the arguments of decoding that an attention layer sets."""
    config = attention.config
    scores = {"softcap": config.softcap, "sinks": attention.local_sinks, "alibi_slopes": attention.slopes(q)}
    return {"window": config.mask.hi} | scores


@lru_cache(maxsize=64)
def windows_of(config: TransformerConfig) -> tuple[int | None, ...]:
    """Return each layer's window, the earlier tokens that a query sees; None: all; 0 for a recurrent layer, without keys."""
    recurrent = recurrent_layers(config.mixers)
    masks = [sliding_window(0) if layer in recurrent else config.attention(layer).mask for layer in range(config.depth)]
    for layer, mask in enumerate(masks):
        if mask.lo != 0 or (mask.hi is not None and mask.hi < 0):
            raise ValueError(
                f"layer {layer} has the mask {mask}, and text is generated where a token sees itself and tokens before it: make "
                "the model with mask=causal() or sliding_window(before)"
            )
    return tuple(mask.hi for mask in masks)


def check_ids(ids: Sequence[int], vocab: int, whose: str) -> None:
    """Raise ValueError if an id is below 0 or at least ``vocab``. ``whose``: start of the message, such as "stop holds"."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        strange = next(x for x in ids if not 0 <= x < vocab)
        raise ValueError(
            f"{whose} {strange}, and a vocabulary of {vocab} has 0 to {vocab - 1}: encode with the model's tokenizer"
        )


def bucket(tokens: int) -> int:
    """Return ``tokens`` rounded up by at most 1/8: eight sizes to each power of two, so that few programs are compiled."""
    step = max(1, 2 ** (tokens.bit_length() - 4))
    return -(-tokens // step) * step


def _round_up(slots: int) -> int:
    return -(-slots // SLOTS) * SLOTS


def _most(new: Any, prompts: int) -> tuple[int, ...]:
    new = _plain(new)
    several = isinstance(new, list | tuple)
    each = list(new) if several else [new] * prompts
    if len(each) != prompts:
        raise ValueError(f"max_new_tokens has {len(each)} numbers, and there are {prompts} prompts: pass one for each, or an int")
    for i, number in enumerate(each):
        name = f"max_new_tokens[{i}]" if several else "max_new_tokens"
        if not is_integer(number) or number < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {in_words(number)}: pass an int, or one for each prompt")
        if number > MAX_TOKENS:
            raise ValueError(f"{name}={number}, and the cache is made for all of them: ask for {MAX_TOKENS} at most")
    return tuple(map(int, each))


def _ids(stop: Any) -> tuple[int, ...]:
    """Return the token ids of ``stop``, one id or several, in ascending order. Raise ValueError if it is anything else."""
    stop = _plain(stop)
    ids = [stop] if is_integer(stop) else stop
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence | set | frozenset):
        raise ValueError(f"stop must be token ids, ints, at which a request ends, got {in_words(stop)}")
    for x in ids:
        if not is_integer(x):
            raise ValueError(f"stop must be token ids, ints, at which a request ends, and has {in_words(x)}")
    return tuple(sorted({int(x) for x in ids}))


def _plain(x: Any) -> Any:
    """Return an array as a number or nested lists; return anything else unchanged."""
    return x.tolist() if hasattr(x, "tolist") else x


def _rows(prompts: Any) -> tuple[tuple[int, ...], ...]:
    """Return the prompts (lists, tuples or arrays of ints) as tuples. Raise ValueError if a type is wrong, or none is given."""
    some = [prompts] if isinstance(prompts, str | bytes) else prompts if isinstance(prompts, list | tuple) else []
    if any(isinstance(row, str | bytes) for row in some):
        raise ValueError(
            "prompts must be lists of token ids, got text: encode it with the model's tokenizer first, or, for a vocabulary of "
            "bytes, by list(text.encode())"
        )
    plain = lambda x: list(x) if isinstance(x, list | tuple) else _plain(x)
    rows = [plain(row) for row in plain(prompts)] if isinstance(plain(prompts), list) else None
    if not rows:
        raise ValueError(f"prompts must be a list of lists of token ids, at least one, got {in_words(prompts)}")
    for i, row in enumerate(rows):
        if not isinstance(row, list):
            raise ValueError(f"prompts[{i}] must be a list of token ids, got {in_words(row)}: for one prompt pass [ids]")
        if not all(type(x) is int or is_integer(x) for x in row):
            strange = next(x for x in row if not is_integer(x))
            raise ValueError(f"prompts[{i}] must hold token ids, ints, and has {in_words(strange)}")
    return tuple(tuple(map(int, row)) for row in rows)
