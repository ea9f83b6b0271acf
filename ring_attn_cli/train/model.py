"""The model of a run, built and saved by the package of either framework: ring_attn_torch or ring_attn_jax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .arithmetic import first_adapters, first_weights
from .config import DTYPES, Config
from .data import is_llama


def build_model(config: Config, package: Any, first: dict[str, Any], **options: Any) -> Any:
    """Load the model from ``init_from`` if set, else draw weights by ``first_weights``. Add adapters if ``lora`` is set.
    ``first``: the constructor's options that a load lacks. ``options``: the ring's, which both take."""
    options |= config.ring.model_options
    if config.init_from is not None:
        load = package.load_llama if is_llama(config.init_from) else package.load_weights
        param_dtype, compute_dtype = (config.model.get(name) for name in DTYPES)
        model = load(config.init_from, dtype=param_dtype, compute_dtype=compute_dtype, **options)
    else:
        model = package.RingTransformer.from_config(config.transformer(), **options, **first)
        package.from_numpy(model, first_weights(package.to_numpy(model), config.seed))
    if config.lora is not None:
        adapters = first_adapters(config.lora, model.config, config.seed)
        package.training.lora.add_adapters(model, config.lora, adapters)
    return model


def save_model(config: Config, package: Any, model: Any, **group: Any) -> None:
    """Save the weights in the run's folder; with LoRA, first save the adapters and merge them into the weights."""
    if config.lora is not None:
        package.training.lora.save_adapters(model, config.lora, Path(config.out, "adapters"), config.init_from, **group)
        package.training.lora.merge_adapters(model)
    package.save_weights(model, Path(config.out, "weights"), **group)
