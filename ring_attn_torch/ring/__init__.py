"""The ring of a call: its ranks, their agreement on the call, the loop over shards of keys, and the strategies.

``agreement.py`` makes all ranks run one problem or raise one error, ``loop.py`` runs the steps, forward and backward, and
``strategies/`` moves the keys.
"""
