"""Strategies by name: ``strategy(keys, ring)`` yields a ``Step`` for each shard of keys that this rank sees.

``ring/step.py`` holds the interface of a ``Step``; CONTRIBUTING.md says how to add a strategy.
"""

from .ring import circulate

STRATEGIES = {"ring": circulate}
