"""The demo: exact attention over a ring and a transformer trained on it, in PyTorch and JAX at once.

``run.py`` starts the processes and judges the results. ``exactness.py`` and ``training.py`` define the problems and the bounds.
``torch_side.py`` and ``jax_side.py`` compute them, each imported only in the processes of its framework.
"""
