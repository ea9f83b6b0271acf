"""Training of a language model over a ring, from a TOML file, in either framework.

``config.py`` holds the config of a run and ``loop.py`` its loop. ``torch_side.py`` and ``jax_side.py`` compute the steps; each is
imported only if its framework is used. ``run.py`` starts the ranks. A run's folder holds ``log.jsonl``, which ``picture.py``
plots, the same numbers in ``tensorboard``, ``checkpoints``, and at the end ``weights``, which ``load_weights`` of either package
reads.
"""
