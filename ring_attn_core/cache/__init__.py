"""The arithmetic of a key/value cache that is sharded over the ring: who holds which token, and what fits."""
