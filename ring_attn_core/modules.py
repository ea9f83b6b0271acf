"""Re-export of ``alibi_slopes`` from ``model/alibi.py``."""

from .model.alibi import alibi_slopes as alibi_slopes
