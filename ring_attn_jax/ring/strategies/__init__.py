"""How keys travel, by name: ``strategy(keys, ring)`` yields a ``Step`` for every shard of keys that this rank sees.

What a ``Step`` must offer is in ``ring/step.py``; CONTRIBUTING.md says how to add a strategy.
"""

from .ring import circulate

STRATEGIES = {"ring": circulate}
