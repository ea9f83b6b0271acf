"""The ring of a call: the loop over shards of keys, and the strategies.

``loop.py`` runs the steps of the ring, forward and backward, and ``strategies/`` moves the keys between the ranks.
``ring/agreement.py`` of ring_attn_torch compares the calls of all ranks. This package needs no such file, because all ranks of a
process run one program. ``check_ranks`` in ``training/ranks.py`` finds weights, seeds and arguments that differ between devices
or processes.
"""
