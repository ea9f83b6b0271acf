"""The static description of a cache: frozen records that check their values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..layouts import check_ranks
from ..validation import hold_numbers, in_words, is_integer

FP8 = "float8_e4m3fn"
DTYPES = ("bfloat16", "float16", "float32", "float64", FP8)
MAX_FLOAT8 = 448.0
"""The largest value of float8 e4m3 (arXiv:2209.05433, table 1)."""


@dataclass(frozen=True)
class CacheSizes:
    """The sizes of one cached token: k [layers, kv_heads, head_dim] and v [layers, kv_heads, v_dim].

    A ``v_dim`` of None means ``head_dim``. Raise ValueError if a size is not an int of at least 1.
    """

    layers: int
    kv_heads: int
    head_dim: int
    v_dim: int = None  # type: ignore[assignment]  # filled in below, an int from then on

    def __post_init__(self) -> None:
        hold_numbers(self, ("layers", "kv_heads", "head_dim", "v_dim"))
        if self.v_dim is None:
            object.__setattr__(self, "v_dim", self.head_dim)
        for name, size in asdict(self).items():
            _check_count(name, size)

    @classmethod
    def of(cls, config: Any) -> CacheSizes:
        """Return ``config`` if it is a CacheSizes, else make a CacheSizes from its ``depth``, without recurrent layers,
        ``kv_heads`` and ``head_dim``.

        Raise ValueError if ``config`` lacks one of these three, if no layer has attention, or if a size is not an int of at least
        1.
        """
        if isinstance(config, cls):
            return config
        recurrent = len(_recurrent(config))
        if recurrent and recurrent == config.depth:
            raise ValueError(
                "a KVCache counts tokens by the keys of attention layers, and all layers of this model are recurrent: call the "
                "model on all tokens so far for each new one"
            )
        try:
            return cls(config.depth - recurrent, config.kv_heads, config.head_dim)
        except AttributeError as error:
            raise ValueError(
                f"a cache is made for a TransformerConfig or CacheSizes(layers, kv_heads, head_dim), got {in_words(config)}"
            ) from error


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The static description of a cache: each rank has ``slots`` slots, of one token each, for each of ``batch`` requests.
    ``window``: earlier positions that a query sees; None: all. Tokens outside it free their slots; ``room`` limits the tokens of
    a step or rollback. ``page``: slots grow by its multiples; None: never. ``scaled``: the caller passes float8 scales.
    ``states``: what each recurrent layer keeps of a request, by shapes, in ``state_dtype``."""

    sizes: CacheSizes
    batch: int
    ranks: int
    slots: int
    dtype: str
    window: int | None = None
    room: int | None = None
    page: int | None = None
    scaled: bool = False
    states: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    state_dtype: str = "float32"

    @classmethod
    def of(cls, config: Any, batch: int, capacity: int | None, ranks: int, **options: Any) -> CacheSpec:
        """Return the spec of a cache. ``capacity``: tokens of a request, shared by ranks in even numbers, so that a full prompt
        fits every layout; with a window: slots of each rank, by default ``window + room``."""
        check_ranks(ranks)
        computes_in = getattr(config, "compute_dtype", None) or getattr(config, "param_dtype", "bfloat16")
        if options.get("dtype") is None:
            options["dtype"] = computes_in
        if recurrent := _recurrent(config):
            options["states"] = tuple(config.mixer(layer).state_shapes for layer in recurrent)
            options["state_dtype"] = "float64" if computes_in == "float64" else "float32"
        window, room, page = (options.get(name) for name in ("window", "room", "page"))
        if window is None:
            if room is not None:
                raise ValueError(f"room={room} goes with window: a cache without one goes back as far as you like, leave it out")
            _check_count("capacity", capacity)
            slots = -(-capacity // ranks)  # type: ignore[operator]
            slots += slots % 2 if ranks > 1 else 0  # zigzag's shards are even
        else:
            _check_count("window", window)
            if page is not None:
                raise ValueError(f"page={page} and window={window}: what a window sees does not grow, leave page out")
            options["room"] = room = window if room is None else room
            _check_count("room", room)
            slots = window + room if capacity is None else capacity
            _check_count("capacity", slots)
            if slots < window + room:
                raise ValueError(
                    f"capacity={capacity} cannot hold window + room = {window} + {room}: a rank may hold everything that a query "
                    f"sees (zigzag leaves the end of a prompt with one rank), so pass at least {window + room}, or None"
                )
        if page is not None:
            _check_count("page", page)
            slots = -(-slots // page) * page
        return cls(sizes=CacheSizes.of(config), batch=batch, ranks=ranks, slots=slots, **options)

    def __post_init__(self) -> None:
        hold_numbers(self, ("batch", "ranks", "slots", "window", "room", "page"))
        _check_count("batch", self.batch)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {in_words(self.dtype)}")
        if self.scaled and self.dtype != FP8:
            raise ValueError(f"k_scale and v_scale go with dtype={FP8!r}, and this cache has {self.dtype}: leave them out")

    @property
    def float8(self) -> bool:
        """True if the cache stores float8 values, each divided by a scale."""
        return self.dtype == FP8

    @property
    def capacity(self) -> int | None:
        """The largest number of tokens of a request if the ranks hold equal shares of them. None (no limit) with a window."""
        return None if self.window is not None else self.ranks * self.slots

    @property
    def remembered(self) -> int:
        """The number of a request's newest tokens whose rank is recorded. A rollback removes at most this number of tokens."""
        return self.ranks * self.slots if self.room is None else self.room

    def fingerprint(self) -> tuple[tuple[str, Any], ...]:
        """Return a (name, value) pair for each field of the sizes and of this record. All ranks must have equal pairs."""
        own = asdict(self)
        return tuple((own.pop("sizes") | own).items())


def _recurrent(config: Any) -> list[int]:
    return [layer for layer, name in enumerate(getattr(config, "mixers", None) or ()) if name != "attention"]


def _check_count(name: str, value: Any) -> None:
    if not is_integer(value) or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, got {in_words(value)}")
