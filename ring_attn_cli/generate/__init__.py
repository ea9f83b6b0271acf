"""Text generation from a folder of weights, in PyTorch or JAX, each imported only if used. ``run.py`` starts a worker."""
