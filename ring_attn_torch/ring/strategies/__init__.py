"""The strategies by which keys travel, by name.

``ring/step.py`` defines ``Strategy`` and ``Step``. The section "Add a strategy" of CONTRIBUTING.md says how to add one.
"""

from ..step import Strategy
from .direct import Direct
from .gather import Gather
from .pull import Pull
from .push import Push
from .ring import OneWay
from .two_level import TwoLevels
from .two_way import TwoWay
from .ulysses import HeadExchange

STRATEGIES: dict[str, Strategy] = {
    "ring": OneWay(),
    "direct": Direct(),
    "two_way": TwoWay(),
    "gather": Gather(),
    "ulysses": HeadExchange(),
    "two_level": TwoLevels(),
    "pull": Pull(),
    "push": Push(),
}
