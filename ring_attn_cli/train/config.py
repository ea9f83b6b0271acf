"""The config of a training run: frozen records read from a TOML file, one for each table. docs/train.md describes each key."""

from __future__ import annotations

import json
import math
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from ring_attn_core import layouts
from ring_attn_core.data.settings import BALANCED
from ring_attn_core.model.checks import MAX_INT32, check_activations
from ring_attn_core.model.lora import LoRA
from ring_attn_core.problem.strategies import check_order, check_strategy

if TYPE_CHECKING:
    from ring_attn_core.model.config import TransformerConfig

MODEL: dict[str, Any] = {"vocab": 256, "dim": 128, "depth": 2, "heads": 4, "kv_heads": 2}
DTYPES = "param_dtype", "compute_dtype"
"""The only keys of ``[model]`` that are allowed with ``init_from``."""
KINDS: dict[Any, tuple[str, str, float]] = {
    int: ("an integer", "a list of integers", MAX_INT32),
    float: ("a number", "a list of numbers", sys.float_info.max),
    str: ("a text", "a list of texts", MAX_INT32),
}
"""For each type of a value its name, the name of a list of such values, and the largest absolute integer."""
Schedule = Literal["constant", "linear", "cosine", "wsd"]
Weights = Literal["whole", "sharded"]


@dataclass(frozen=True, kw_only=True)
class Data:
    """The arguments of ``SequenceShardedDataset``, the held-out files, and the microbatches in a step, ``accumulate``."""

    folder: str = field(default_factory=lambda: sysconfig.get_paths()["stdlib"])
    pattern: str = "*.py"
    held_out: str = "asyncio/*.py"
    length: int = 1024
    batch_size: int = 4
    accumulate: int = 1
    batch_tokens: int | None = None
    column: str = "text"
    tokenizer: str | None = None
    end: int | None = None
    chat: str | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The hyperparameters of AdamW, and those of the learning rate, which ``arithmetic.rates`` computes from the first five."""

    learning_rate: float = 3e-3
    schedule: Schedule = "cosine"
    last_rate: float = 0.1
    warmup: int = 20
    cooldown: float = 0.2
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            raise ValueError(
                f"optimizer.schedule must be one of {', '.join(get_args(Schedule))}, got {self.schedule!r}: for a schedule of "
                "optax or torch.optim train by a program of your own, such as jax_train_lm.py or torch_train_lm.py of examples/"
            )


@dataclass(frozen=True, kw_only=True)
class RingConfig:
    """The parallelism of a run, and the options of ``RingTransformer``. Raise ValueError if a name is unknown."""

    ranks: int = 4
    replicas: int = 1
    layout: str = "zigzag"
    backend: str = "auto"
    strategy: str = "auto"
    order: str = "ring"
    activations: str = "keep"
    weights: Weights = "whole"
    chunk: int = 4096

    def __post_init__(self) -> None:
        from ring_attn_core.kernels.backends import check_backend

        check_backend(self.backend)
        check_strategy(self.strategy)
        check_order(self.order, self.strategy)
        check_activations(self.activations)
        if self.weights not in get_args(Weights):
            raise ValueError(f"ring.weights must be one of {', '.join(map(repr, get_args(Weights)))}, got {self.weights!r}")

    @property
    def model_options(self) -> dict[str, Any]:
        """Return the options of a model's constructor. With a balanced layout each call passes the layout of its batch."""
        layout = "contiguous" if self.layout == BALANCED else self.layout
        names = "backend", "strategy", "order", "activations"
        return {"layout": layout} | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation on held-out text, by at most ``buckets`` buckets of positions."""

    every: int = 50
    batches: int = 4
    buckets: int = 8


@dataclass(frozen=True, kw_only=True)
class Passkeys:
    """The passkey test: the model must find a number of ``digits`` digits that is hidden in a text of ``lengths`` tokens."""

    lengths: tuple[int, ...] = (256, 512, 1024)
    texts: int = 8
    digits: int = 5
    train_every: int = 0


COUNTS = "steps save_every keep data.length data.batch_size data.accumulate ring.ranks ring.replicas ring.chunk"
COUNTS += " evaluation.every evaluation.batches evaluation.buckets passkey.texts passkey.digits"
ABOVE = "more than 0 and finite", lambda x: 0 < x < math.inf
FROM = "at least 0 and finite", lambda x: 0 <= x < math.inf
BELOW = "at least 0 and below 1", lambda x: 0 <= x < 1
RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    **dict.fromkeys(COUNTS.split(), ("at least 1", lambda x: x >= 1)),
    "passkey.train_every": ("at least 0, which is never", lambda x: x >= 0),
    "optimizer.learning_rate": ABOVE,
    "optimizer.last_rate": FROM,
    "optimizer.warmup": FROM,
    "optimizer.cooldown": ("more than 0 and at most 1", lambda x: 0 < x <= 1),
    "optimizer.beta1": BELOW,
    "optimizer.beta2": BELOW,
    "optimizer.eps": ABOVE,
    "optimizer.decay": FROM,
    "optimizer.clip": ("more than 0", lambda x: x > 0),
}
"""The range of each number, in words and as a test."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The config of a training run, whose numbers are in their ranges and fit together."""

    out: str = "train-output"
    steps: int = 200
    seed: int = 0
    save_every: int = 50
    keep: int = 2
    init_from: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    lora: LoRA | None = None
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    ring: RingConfig = field(default_factory=RingConfig)
    evaluation: Evaluation = field(default_factory=Evaluation)
    passkey: Passkeys = field(default_factory=Passkeys)

    def __post_init__(self) -> None:
        for name, (words, fits) in RANGES.items():
            if not fits(value := attrgetter(name)(self)):
                raise ValueError(f"{name} must be {words}, got {value}")
        unit = self.ring.ranks * (1 if self.ring.layout == BALANCED else layouts.slots(self.ring.layout))
        if self.data.length % unit:
            raise ValueError(
                f"data.length = {self.data.length} cannot be split by {self.ring.ranks} ranks in the layout "
                f"{self.ring.layout!r}: make it a multiple of {unit}, or change ring.ranks"
            )
        if self.data.batch_tokens is not None and self.data.accumulate != 1:
            raise ValueError(
                f"data.batch_tokens = {self.data.batch_tokens} says what a step is, and so does data.accumulate = "
                f"{self.data.accumulate}: leave out one of them"
            )
        if abs(self.seed) + self.steps > MAX_INT32:
            raise ValueError(
                f"seed + steps must be at most {MAX_INT32}, for each step draws by their sum, got seed = {self.seed}"
            )
        if self.init_from is not None and set(self.model) - set(DTYPES):
            raise ValueError(
                f"init_from = {self.init_from!r} says what the model is, and so does [model]: leave out one of them; "
                f"beside init_from the table may have {' and '.join(DTYPES)}"
            )
        if self.init_from is None and self.lora is not None:
            raise ValueError("[lora] freezes the weights of init_from, and init_from is missing: pass a model, or no [lora]")
        if self.init_from is None:
            self.transformer()

    def transformer(self) -> TransformerConfig:
        from ring_attn_core.model.as_json import named_fields
        from ring_attn_core.model.config import TransformerConfig

        check_keys("model", self.model, [x.name for x in named_fields(TransformerConfig)])
        return TransformerConfig.from_json(json.dumps(MODEL | dict(self.model)))

    @property
    def rows(self) -> int:
        """Return the number of packed rows in a microbatch, over all replicas."""
        return self.data.batch_size * self.ring.replicas

    @property
    def tokens(self) -> int:
        """Return the number of tokens in a step, over all ranks."""
        return self.rows * self.data.length * self.microbatches

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches in a step; with ``data.batch_tokens``, those of a global batch."""
        return self.data.accumulate if self.data.batch_tokens is None else self.data.batch_tokens // self.data.length

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


def read(path: Path | None, *, out: str | None = None, steps: int | None = None, ranks: int | None = None) -> Config:
    """Read the config from a TOML file, or take the defaults without a ``path``. The other arguments override it."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"there is no {path}: pass the path of a TOML file, or none for the defaults") from None
        except IsADirectoryError:
            raise ValueError(f"{path} is a folder: pass the path of a TOML file in it, or none for the defaults") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not valid TOML: {error}") from error
    ring = values.setdefault("ring", {})
    for table, name, value in ((values, "out", out), (values, "steps", steps), (ring, "ranks", ranks)):
        if value is not None and isinstance(table, dict):
            table[name] = value
    return build_record(Config, values, "")


def build_record(kind: type[Any], values: Mapping[str, Any], table: str) -> Any:
    hints = get_type_hints(kind)
    check_keys(table, values, list(hints))
    return kind(**{name: _convert(hints[name], value, f"{table}.{name}".lstrip(".")) for name, value in values.items()})


def check_keys(table: str, values: Mapping[str, Any], known: list[str]) -> None:
    where = f"[{table}]" if table else "the top of the config"
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.4)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{where} has no key {name!r}: {meant}it has {', '.join(known)}")


def _convert(hint: Any, value: Any, name: str) -> Any:
    """Return ``value`` in the type of the annotation ``hint``. The record itself checks a Literal."""
    hint = get_args(hint)[0] if isinstance(hint, UnionType) else hint  # X | None: TOML has no None
    if get_origin(hint) is Literal:
        return value
    if is_dataclass(hint) or get_origin(hint) is Mapping:
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be a table, [{name}], got {value!r}")
        return build_record(hint, value, name) if is_dataclass(hint) else value  # type: ignore[arg-type]
    several = get_origin(hint) is tuple
    kind = get_args(hint)[0] if several else hint
    one, many, most = KINDS[kind]
    items = value if isinstance(value, list) else [value]
    types = (int, float) if kind is float else (kind,)
    if several != isinstance(value, list) or not all(type(each) in types for each in items):
        raise ValueError(f"{name} must be {many if several else one}, got {value!r}")
    for each in items:
        if isinstance(each, int) and abs(each) > most:
            raise ValueError(f"{name} must be at most {most:.10g}, got {each}: pass a smaller one")
    return tuple(items) if several else kind(items[0])
