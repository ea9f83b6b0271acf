"""Likely causes of a missed bound: hypotheses, each a function from the evidence to a sentence or None.

A hypothesis computes the result that its mistake would give, and holds only if that explains the measurement: the remaining error
is at most a few times the bound, or a small fraction of the error before. The hypotheses about the forward come first. If one of
them holds, the gradients are not judged, because their errors follow from it.
"""

from __future__ import annotations

import math

from .backward import wrong_backward
from .evidence import Evidence
from .forward import HYPOTHESES, base_two, not_finite
from .gradients import lost_gradient, lse_without_gradient

__all__ = ["Evidence", "diagnose"]


def diagnose(evidence: Evidence, attention: bool = True) -> list[str]:
    """Return the sentences, at least one if a bound is missed. ``attention``: the arrays are those of attention itself."""
    if not evidence.missed:
        return []
    said = next((words for each in (HYPOTHESES if attention else (not_finite,)) if (words := each(evidence))), None)
    if said is not None:
        return [said]
    of_lse = [words for each in (base_two, lse_without_gradient) if attention and (words := each(evidence))]
    names = _unexplained(evidence, bool(of_lse))
    if attention and {"dq", "dk"} & {*names} and (whole := wrong_backward(evidence)):
        of_lse, names = [*of_lse, whole[0]], [name for name in names if name not in whole[1]]
    lost = [words for name in names if (words := lost_gradient(evidence, name, attention))]
    return of_lse + lost or [f"no known mistake explains the error of {', '.join(evidence.missed)}"]


def _unexplained(evidence: Evidence, of_lse: bool) -> list[str]:
    """Return the missed gradients that no mistake of lse explains.

    With ``of_lse``, two weights of the cotangent of lse are tried: 1 / ln 2 (lse in base 2) and 0 (its gradient is lost).
    """
    names = [name for name in evidence.truth.exact if name in evidence.missed and name.startswith("d")]
    for counts in (1 / math.log(2), 0.0) if of_lse else ():
        right = evidence.exact(evidence.of_heads, counts)
        after = {name: evidence.error_of_heads(name, right[name]) for name in names}
        names = [name for name in names if not evidence.explained(name, evidence.error(name), after[name])]
    return names
