"""Training of a language model over a ring of ranks, from a TOML file, in PyTorch or JAX.

``config.py`` holds the config of a run, ``loop.py`` the loop. ``torch_worker.py`` and ``jax_worker.py`` compute the steps; each
is imported only if its framework is used. ``run.py`` starts the ranks. The folder of a run holds ``checkpoints``, the log
``log.jsonl``, which ``picture.py`` plots, and the same numbers as events in ``tensorboard`` (``events.py``). When training has
ended it also holds ``weights``, which ``load_weights`` of ring_attn_torch and of ring_attn_jax reads.
"""
