"""What a run is, as frozen records read from a TOML file: a record for each table of the file."""

from __future__ import annotations

import json
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from ring_attn_core import layouts
from ring_attn_core.model.checks import LARGEST

if TYPE_CHECKING:
    from ring_attn_core.model.config import TransformerConfig

MODEL: dict[str, Any] = {"vocab": 256, "dim": 128, "depth": 2, "heads": 4, "kv_heads": 2}
"""What the table ``[model]`` need not say."""
DTYPES = "param_dtype", "compute_dtype"
"""All that ``[model]`` may say beside ``init_from``."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The arguments of ``SequenceShardedDataset``; ``held_out`` is the pattern of the files of the evaluation.

    Without a folder it is the source of Python's standard library, its top modules and, held out, asyncio.
    """

    folder: str = field(default_factory=lambda: sysconfig.get_paths()["stdlib"])
    pattern: str = "*.py"
    held_out: str = "asyncio/*.py"
    length: int = 1024
    batch_size: int = 4
    accumulate: int = 1
    tokenizer: str | None = None
    end: int | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW; its rate grows over ``warmup`` steps, then falls as a cosine to ``last_rate`` of it. ``clip``: the largest norm."""

    learning_rate: float = 3e-3
    last_rate: float = 0.1
    warmup: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1
    clip: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Ring:
    """How many ``ranks`` share a sequence, how many ``replicas`` take other rows, and how ``RingTransformer`` runs there.

    ``chunk``: tokens whose logits exist at a time.
    """

    ranks: int = 4
    replicas: int = 1
    layout: str = "zigzag"
    backend: str = "auto"
    strategy: str = "auto"
    activations: str = "keep"
    chunk: int = 4096


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Every so many steps, over how many batches, in how many ``buckets`` of positions."""

    every: int = 50
    batches: int = 4
    buckets: int = 8


@dataclass(frozen=True, kw_only=True)
class Passkeys:
    """A number is hidden in texts of these ``lengths``, ``texts`` of each; ``train_every``: which steps learn it, 0 for none."""

    lengths: tuple[int, ...] = (256, 512, 1024)
    texts: int = 8
    digits: int = 5
    train_every: int = 0


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run. ``out``: its folder; ``init_from``: a folder that ``load_weights`` or ``load_llama`` reads, in place of ``model``.

    ``save_every``: steps between checkpoints, of which ``keep`` stay. Raises ValueError for numbers out of their range.
    """

    out: str = "train-output"
    steps: int = 200
    seed: int = 0
    save_every: int = 50
    keep: int = 2
    init_from: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    ring: Ring = field(default_factory=Ring)
    evaluation: Evaluation = field(default_factory=Evaluation)
    passkey: Passkeys = field(default_factory=Passkeys)

    def __post_init__(self) -> None:
        whole = {"steps": self.steps, "save_every": self.save_every, "keep": self.keep}
        whole |= {f"data.{name}": getattr(self.data, name) for name in ("length", "batch_size", "accumulate")}
        whole |= {f"ring.{name}": getattr(self.ring, name) for name in ("ranks", "replicas", "chunk")}
        whole |= {f"evaluation.{name}": getattr(self.evaluation, name) for name in ("every", "batches", "buckets")}
        whole |= {"passkey.texts": self.passkey.texts, "passkey.digits": self.passkey.digits}
        for name, value in whole.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("learning_rate", "eps", "clip"):
            if not getattr(self.optimizer, name) > 0:
                raise ValueError(f"optimizer.{name} must be more than 0, got {getattr(self.optimizer, name)}")
        unit = self.ring.ranks * layouts.slots(self.ring.layout)
        if self.data.length % unit:
            raise ValueError(
                f"data.length = {self.data.length} cannot be split by {self.ring.ranks} ranks in the layout "
                f"{self.ring.layout!r}: make it a multiple of {unit}, or change ring.ranks"
            )
        if abs(self.seed) + self.steps > LARGEST:
            raise ValueError(f"seed + steps must be at most {LARGEST}, for each step draws by their sum, got seed = {self.seed}")
        if self.passkey.train_every < 0:
            raise ValueError(f"passkey.train_every must be at least 0, which is never, got {self.passkey.train_every}")
        if self.init_from is not None and set(self.model) - set(DTYPES):
            raise ValueError(
                f"init_from = {self.init_from!r} says what the model is, and so does [model]: leave out one of them; "
                f"beside init_from the table may have {' and '.join(DTYPES)}"
            )
        if self.init_from is None:
            self.transformer()

    def transformer(self) -> TransformerConfig:
        """What ``[model]`` describes; ValueError for what is none."""
        from ring_attn_core.model.config import TransformerConfig

        check_keys("model", self.model, [x.name for x in fields(TransformerConfig)])
        return TransformerConfig.from_json(json.dumps(MODEL | dict(self.model)))

    @property
    def rows(self) -> int:
        """Contexts of a microbatch, of all replicas together."""
        return self.data.batch_size * self.ring.replicas

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all ranks together."""
        return self.rows * self.data.length * self.data.accumulate

    def described(self) -> dict[str, Any]:
        """The record as JSON carries it."""
        return asdict(self)


def read(path: Path | None, *, out: str | None = None, steps: int | None = None, ranks: int | None = None) -> Config:
    """The config of a TOML file, the defaults where there is none; ``out``, ``steps`` and ``ring.ranks`` may be given besides.

    Raises ValueError for a file that is none or no TOML, for a key that no table has, naming the nearest one that it has, and for
    a value of another type.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"there is no {path}: pass the path of a TOML file, or none for the defaults") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no TOML: {error}") from error
    ring = values.setdefault("ring", {})
    for table, name, value in ((values, "out", out), (values, "steps", steps), (ring, "ranks", ranks)):
        if value is not None and isinstance(table, dict):
            table[name] = value
    return made(Config, values, "")


def made(kind: type[Any], values: Mapping[str, Any], table: str) -> Any:
    """The record of a table; ValueError for keys and values that it does not have."""
    hints = get_type_hints(kind)
    check_keys(table, values, [x.name for x in fields(kind)])
    return kind(**{name: _value(hints[name], value, f"{table}.{name}".lstrip(".")) for name, value in values.items()})


def check_keys(table: str, values: Mapping[str, Any], known: list[str]) -> None:
    """ValueError for a key that is not among the known ones, naming the nearest."""
    where = f"[{table}]" if table else "the top of the config"
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.4)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{where} has no key {name!r}: {meant}it has {', '.join(known)}")


class Form(NamedTuple):
    """A type of values: its words in an error, whether a value of the file is one, and the value as the records hold it.

    ``most``: how far from 0 an integer may be in it.
    """

    words: str
    fits: Callable[[Any], bool]
    held: Callable[[Any], Any]
    most: float = LARGEST


FORMS: dict[str, Form] = {
    "Mapping": Form("a table", lambda x: isinstance(x, dict), dict),
    "tuple": Form("a list of integers", lambda x: isinstance(x, list) and all(type(each) is int for each in x), tuple),
    "float": Form("a number", lambda x: isinstance(x, int | float) and not isinstance(x, bool), float, sys.float_info.max),
    "str": Form("a text", lambda x: isinstance(x, str), str),
    "int": Form("an integer", lambda x: isinstance(x, int) and not isinstance(x, bool), int),
}
"""By a name in the annotation of a field; the first that stands there counts."""


def _value(hint: Any, value: Any, name: str) -> Any:
    if hasattr(hint, "__dataclass_fields__"):
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be a table, [{name}], got {value!r}")
        return made(hint, value, name)
    form = next(form for kind, form in FORMS.items() if kind in str(hint))
    if not form.fits(value):
        raise ValueError(f"{name} must be {form.words}, got {value!r}")
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, int) and abs(each) > form.most:
            raise ValueError(f"{name} must be at most {form.most:.10g}, got {each}: pass a smaller one")
    return form.held(value)
