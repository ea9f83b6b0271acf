"""Other projects' tests with our functions in the place of theirs. Nothing of them is copied: they are read where they stand.

    python -m parity_tests.outside [tokamax jax ...] [--source SUITE=FOLDER] [--ranks N ...] [-k WORDS] [--page FILE]

A suite stands in an installed package, or in a checkout that ``--source`` names; ``suites.py`` lists them. Each runs in a process
of its own, or in one for each rank: ``one.py`` runs it with pytest, and tells refused cases (our ValueError or TypeError) from
failed ones. ``in_jax.py`` and ``in_torch.py`` cut a case's arrays into shards and join the results.
"""
