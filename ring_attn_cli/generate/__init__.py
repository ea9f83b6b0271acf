"""Text generation from a folder of weights, in PyTorch or JAX.

``settings.py`` holds the options and ``text.py`` converts between text and token ids. ``torch_worker.py`` and ``jax_worker.py``
generate; each is imported only if its framework is used. ``run.py`` starts one of these and shows the tokens as they arrive.
"""
