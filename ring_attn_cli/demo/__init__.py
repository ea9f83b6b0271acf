"""The demo: exact attention over a ring and a transformer trained on it, in PyTorch and JAX at once, judged as it runs.

``run.py`` starts the processes and judges; ``exactness.py`` and ``training.py`` say what is computed and how far results may be
apart; ``torch_side.py`` and ``jax_side.py`` compute it, each imported only in the processes that need its framework.
"""
