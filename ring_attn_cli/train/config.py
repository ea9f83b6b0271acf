"""The config of a training run: frozen records read from a TOML file, one for each table."""

from __future__ import annotations

import json
import math
import sysconfig
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ring_attn_core import layouts
from ring_attn_core.data.settings import BALANCED
from ring_attn_core.model.activations import check_activations
from ring_attn_core.model.checks import LARGEST
from ring_attn_core.model.lora import LoRA
from ring_attn_core.problem.strategies import check_strategy

from .schedules import schedule
from .tables import check_keys, made

if TYPE_CHECKING:
    from ring_attn_core.model.config import TransformerConfig

MODEL: dict[str, Any] = {"vocab": 256, "dim": 128, "depth": 2, "heads": 4, "kv_heads": 2}
"""Defaults of the table ``[model]``."""
WEIGHTS = "whole", "sharded"
"""The values of ``ring.weights``."""
DTYPES = "param_dtype", "compute_dtype"
"""The only keys of ``[model]`` that are allowed with ``init_from``."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data: the arguments of ``SequenceShardedDataset``, the held-out files, and the number of microbatches in a step.

    ``held_out``: the glob pattern, in ``folder``, of the files for evaluation. ``accumulate``: microbatches in a step.
    ``batch_size``: packed rows of one replica in a microbatch. The default data are the top-level modules of Python's standard
    library, with asyncio held out.
    """

    folder: str = field(default_factory=lambda: sysconfig.get_paths()["stdlib"])
    pattern: str = "*.py"
    held_out: str = "asyncio/*.py"
    length: int = 1024
    batch_size: int = 4
    accumulate: int = 1
    column: str = "text"
    tokenizer: str | None = None
    end: int | None = None
    chat: str | None = None
    seed: int = 0


ABOVE = "more than 0 and finite", lambda x: 0 < x < math.inf
FROM = "at least 0 and finite", lambda x: 0 <= x < math.inf
BELOW = "at least 0 and below 1", lambda x: 0 <= x < 1
RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "learning_rate": ABOVE,
    "last_rate": FROM,
    "warmup": FROM,
    "beta1": BELOW,
    "beta2": BELOW,
    "eps": ABOVE,
    "decay": FROM,
    "clip": ("more than 0", lambda x: x > 0),
}
"""The range of each number of ``Optimizer``, in words and as a test."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The hyperparameters of AdamW.

    The learning rate grows over ``warmup`` steps, then decays as a cosine to ``last_rate`` times ``learning_rate``. ``clip``: the
    largest global norm of the gradients. ``schedule``: schedules of ``schedules.py``, one after another, that replace the warmup
    and the cosine. Raise ValueError if a number is out of its range.
    """

    learning_rate: float = 3e-3
    last_rate: float = 0.1
    warmup: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1
    clip: float = 1.0
    schedule: tuple[Mapping[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        for name, (words, fits) in RANGES.items():
            if not fits(value := getattr(self, name)):
                raise ValueError(f"optimizer.{name} must be {words}, got {value}")


@dataclass(frozen=True, kw_only=True)
class RingConfig:
    """The parallelism of a run, and the options of ``RingTransformer``.

    ``ranks``: number of ranks that share a sequence. ``replicas``: number of rings, each with its own rows. ``weights``: "whole"
    replicates weights, gradients and moments on each rank; "sharded" shards them over all ranks, but in JAX only the arrays with
    a dimension divisible by the number of devices. ``chunk``: number of tokens for which a rank holds logits at a time. Raise
    ValueError if a name is unknown.
    """

    ranks: int = 4
    replicas: int = 1
    layout: str = "zigzag"
    backend: str = "auto"
    strategy: str = "auto"
    activations: str = "keep"
    weights: str = "whole"
    chunk: int = 4096

    def __post_init__(self) -> None:
        from ring_attn_core.kernels.backends import check_backend

        check_backend(self.backend)
        check_strategy(self.strategy)
        check_activations(self.activations)
        if self.weights not in WEIGHTS:
            raise ValueError(f"ring.weights must be one of {', '.join(map(repr, WEIGHTS))}, got {self.weights!r}")

    @property
    def model_layout(self) -> str:
        """Return the layout for the model's constructor: "contiguous" if each call passes a balanced layout, else ``layout``."""
        return "contiguous" if self.layout == BALANCED else self.layout


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation on held-out text.

    ``every``: steps from one evaluation to the next. ``batches``: largest number of microbatches. ``buckets``: largest number of
    position buckets, each with a loss of its own (``edges`` in ``arithmetic.py``).
    """

    every: int = 50
    batches: int = 4
    buckets: int = 8


@dataclass(frozen=True, kw_only=True)
class Passkeys:
    """The passkey test: the model must find a number of ``digits`` digits that is hidden in a text.

    ``lengths``: lengths of the texts in tokens. ``texts``: number of texts of each length. ``train_every``: n means that every
    n-th step trains on texts with a passkey instead of the data; 0 means that no step does.
    """

    lengths: tuple[int, ...] = (256, 512, 1024)
    texts: int = 8
    digits: int = 5
    train_every: int = 0


@dataclass(frozen=True, kw_only=True)
class Config:
    """The config of a training run.

    ``out``: the run's folder. ``init_from``: a folder of weights that ``load_weights`` or ``load_llama`` reads; without it, the
    table ``model`` describes a new model. ``lora``: adapters to train while the weights from ``init_from`` stay frozen.
    ``save_every``: steps between checkpoints. ``keep``: number of newest checkpoints that stay. Raise ValueError if a number is
    out of its range, or if values do not fit together, such as ranks and length.
    """

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
        whole = {"steps": self.steps, "save_every": self.save_every, "keep": self.keep}
        whole |= {f"data.{name}": getattr(self.data, name) for name in ("length", "batch_size", "accumulate")}
        whole |= {f"ring.{name}": getattr(self.ring, name) for name in ("ranks", "replicas", "chunk")}
        whole |= {f"evaluation.{name}": getattr(self.evaluation, name) for name in ("every", "batches", "buckets")}
        whole |= {"passkey.texts": self.passkey.texts, "passkey.digits": self.passkey.digits}
        for name, value in whole.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._check_schedule()
        unit = self.ring.ranks * (1 if self.ring.layout == BALANCED else layouts.slots(self.ring.layout))
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
        if self.init_from is None and self.lora is not None:
            raise ValueError("[lora] freezes the weights of init_from, and init_from is missing: pass a model, or no [lora]")
        if self.init_from is None:
            self.transformer()

    def _check_schedule(self) -> None:
        of, usual = self.optimizer, Optimizer()
        if of.schedule is None:
            return
        schedule(of.schedule, of.learning_rate, self.steps)
        if (of.warmup, of.last_rate) != (usual.warmup, usual.last_rate):
            raise ValueError(
                "optimizer.warmup and last_rate belong to the schedule that a run has without optimizer.schedule: leave "
                "them out, and give the schedule a warmup of its own, such as warmup_steps or a LinearLR before it"
            )

    def transformer(self) -> TransformerConfig:
        """Return the model's config, from the table ``[model]``. Raise ValueError if the table is invalid."""
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
        return self.rows * self.data.length * self.data.accumulate

    def described(self) -> dict[str, Any]:
        """Return the config as nested dicts for JSON."""
        return asdict(self)


def read(path: Path | None, *, out: str | None = None, steps: int | None = None, ranks: int | None = None) -> Config:
    """Read the config from a TOML file, or take the defaults if ``path`` is None.
    ``out``, ``steps`` and ``ranks`` override it."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"there is no {path}: pass the path of a TOML file, or none for the defaults") from None
        except IsADirectoryError:
            raise ValueError(f"{path} is a folder: pass the path of a TOML file in it, or none for the defaults") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no TOML: {error}") from error
    ring = values.setdefault("ring", {})
    for table, name, value in ((values, "out", out), (values, "steps", steps), (ring, "ranks", ranks)):
        if value is not None and isinstance(table, dict):
            table[name] = value
    return made(Config, values, "")
