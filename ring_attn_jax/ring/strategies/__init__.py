"""The strategies by which keys travel: ``strategy(keys, ring)`` yields a ``Step`` for every shard of keys that this rank sees.

``ring/step.py`` defines ``Step``; CONTRIBUTING.md describes how to add a strategy.
"""

from .ring import circulate

STRATEGIES = {"ring": circulate}
