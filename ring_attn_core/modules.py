"""Another import path of ``alibi_slopes``, which is defined in ``model/alibi.py``."""

from .model.alibi import alibi_slopes as alibi_slopes
