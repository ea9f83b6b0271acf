"""A key/value cache sharded over the ring: the rank of each token, the sizes, and argument checks.

``placement.py`` has the rule that gives a new token its rank and slot. A slot without a token is *empty*: its position is -1.
"""
