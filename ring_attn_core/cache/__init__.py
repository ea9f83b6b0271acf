"""Arithmetic of a key/value cache sharded over the ring: the rank of each token, and checks of what fits."""
