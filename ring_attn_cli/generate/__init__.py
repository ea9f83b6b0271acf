"""Text from a folder of weights, in either framework.

``settings.py`` says what is asked, ``text.py`` turns text into ids and back, ``torch_side.py`` and ``jax_side.py`` compute, each
imported only where its framework is needed; ``run.py`` starts them and shows what comes.
"""
