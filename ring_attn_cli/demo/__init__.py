"""The demo: ``ring-attn compare ring``, then a short training of a transformer over a ring, in PyTorch and JAX at the same time.

``run.py`` starts both, ``worker.py`` trains, ``report.py`` prints the losses and holds their bounds.
"""
