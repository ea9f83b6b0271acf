"""Where ``alibi_slopes`` may be imported from besides its own place, ``model/alibi.py``."""

from .model.alibi import alibi_slopes as alibi_slopes
