"""A key/value cache sharded over the ring: the rank of each token, the sizes, and argument checks."""
