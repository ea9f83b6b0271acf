"""The demo: exact attention and the training of a transformer, both over a ring, in PyTorch and JAX at the same time.

``run.py`` starts the processes and judges the results. ``exactness.py`` and ``training.py`` define the problems and the bounds.
``torch_side.py`` and ``jax_side.py`` solve them, each imported only in the processes of its framework.
"""
