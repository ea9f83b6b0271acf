"""Training of a language model over a ring of ranks, from a TOML file, in PyTorch or JAX.

``config.py`` holds the config of a training run and ``loop.py`` the loop. ``torch_side.py`` and ``jax_side.py`` compute the
steps; each is imported only if its framework is used. ``run.py`` starts the ranks. A run's folder holds ``checkpoints``,
``log.jsonl``, which ``picture.py`` plots, and the numbers of the log in ``tensorboard``. At the end it holds ``weights``, which
``load_weights`` of ring_attn_torch and of ring_attn_jax reads.
"""
