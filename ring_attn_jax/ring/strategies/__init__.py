"""The strategies by which keys travel, by name.

To add one, write the methods of ``Strategy`` and ``Step`` that ``ring/step.py`` lists, in a file of this folder and of the other
package's, and name it here and in ``problem/strategies.py`` of the core. The section "Add a strategy" of CONTRIBUTING.md has the
rest.
"""

from ..step import Strategy
from .direct import Direct
from .gather import Gather
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
}
