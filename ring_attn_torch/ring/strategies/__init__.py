"""The table of the strategies, by name. A strategy moves the keys between ranks.

To add a strategy, write the methods of ``Strategy`` and ``Step`` (``ring/step.py``) in a new file of this folder, and in another
new file of the JAX package. Enter the name of the strategy in ``STRATEGIES`` of both packages and of ``problem/strategies.py`` in
the core. The section "Add a strategy" of CONTRIBUTING.md has the other steps.
"""

from ..step import Strategy
from .direct import Direct
from .gather import GatherKeys
from .global_order import GlobalOrder
from .push import Push
from .ring import OneWay
from .two_level import TwoLevels
from .two_way import TwoWay
from .ulysses import HeadExchange

STRATEGIES: dict[str, Strategy] = {
    "ring": OneWay(),
    "direct": Direct(),
    "two_way": TwoWay(),
    "gather": GatherKeys(),
    "ulysses": HeadExchange(),
    "two_level": TwoLevels(),
    "push": Push(),
    "global_order": GlobalOrder(),
}
