"""The framework-neutral part of ring-attn, such as runs, bands, layouts, plans and kernels.

It imports only the standard library. Other packages (numpy, triton, jinja2, pyarrow, tokenizers) are imported on first use.
"""

from .layouts import LAYOUTS
from .masks import MASKS, causal, full, sliding_window
from .plan.batches import plan_batches
from .plan.joined import Gather
from .plan.ring import RingPlan
from .plan.two_level import TwoLevel
from .plan.ulysses import Ulysses
from .runs import Band, Run

__version__ = "0.1.0"
__all__ = [
    "LAYOUTS",
    "MASKS",
    "Band",
    "Gather",
    "RingPlan",
    "Run",
    "TwoLevel",
    "Ulysses",
    "causal",
    "full",
    "plan_batches",
    "sliding_window",
]
