"""The ring of a call: the loop over shards of keys, and the strategies.

``loop.py`` runs the steps, forward and backward, and ``strategies/`` moves the keys. JAX has no counterpart of PyTorch's
``agreement.py``: all ranks of a process run one program, so no calls are compared. ``check_ranks`` in ``training/ranks.py`` finds
weights, seeds and arguments that differ between devices or processes.
"""
