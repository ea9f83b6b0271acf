"""Hugging Face's models over a ring. Importing this package registers ``attn_implementation="ring"``.

Example:

    import ring_attn_torch.transformers as ring

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="ring")
    with ring.sequence_parallel(model):             # global input_ids and labels, the same on every rank
        model(input_ids=ids, labels=ids).loss.backward()
    ring.RingTrainer(model=model, args=args, train_dataset=rows).train()  # or this, outside of sequence_parallel
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ring_attn_core.validation import missing_package

if find_spec("transformers") is None:
    raise missing_package(__name__, "transformers")

from transformers import AttentionInterface, AttentionMaskInterface

from .attention import ring_attention_forward
from .masks import NAME, ring_mask
from .parallel import enable, sequence_parallel

if TYPE_CHECKING:
    from .trainer import RingTrainer, RingTraining

AttentionInterface.register(NAME, ring_attention_forward)
AttentionMaskInterface.register(NAME, ring_mask)

__all__ = ["RingTrainer", "RingTraining", "enable", "sequence_parallel"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import RingTrainer or RingTraining on first access, because transformers' Trainer takes seconds to import."""
    if name in ("RingTrainer", "RingTraining"):
        from . import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
