"""The ring of a call: its ranks, their agreement on the call, the loop over shards of keys, and the strategies.

``agreement.py`` checks that all ranks make the same call; otherwise it raises the same error on all of them. ``loop.py`` runs the
steps of the ring, forward and backward, and ``strategies/`` moves the keys between the ranks.
"""
