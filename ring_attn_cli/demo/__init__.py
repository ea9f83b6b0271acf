"""The demo: ``ring-attn compare ring``, then a short training of a transformer over a ring, in PyTorch and JAX at the same time.

``run.py`` starts both, ``worker.py`` trains, ``results.py`` holds the bounds, and ``report.py`` prints and draws the losses.
"""
