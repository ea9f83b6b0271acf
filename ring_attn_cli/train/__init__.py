"""Training a language model over a ring, from a TOML file, in either framework.

``config.py`` says what a run is and ``loop.py`` what happens when. ``torch_side.py`` and ``jax_side.py`` compute it, each
imported only where its framework is needed; ``run.py`` starts them. A run's folder holds ``log.jsonl``, from which ``picture.py``
draws, ``checkpoints``, and at the end ``weights``, which ``load_weights`` of either package reads.
"""
