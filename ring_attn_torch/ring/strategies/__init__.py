"""How keys travel, by name: ``strategy(keys, ring)`` yields a ``Step`` for every shard of keys that this rank sees."""

from .ring import circulate

STRATEGIES = {"ring": circulate}
