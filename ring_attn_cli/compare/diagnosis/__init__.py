"""What is likely wrong where a bound is missed: small hypotheses, each a function of the evidence to a sentence, or None.

A hypothesis computes what its mistake would give and says so only where that explains what was measured: an error that is left
over is at most a few times the bound, or a small part of what was there before. Those of the forward come first; where one of
them holds, the gradients follow from it and are not judged.
"""

from __future__ import annotations

import math

from .backward import wrong_backward
from .evidence import Evidence
from .forward import HYPOTHESES, base_two, not_finite
from .gradients import lost_gradient, lse_without_gradient

__all__ = ["Evidence", "diagnose"]


def diagnose(evidence: Evidence, attention: bool = True) -> list[str]:
    """The sentences, one at least where something is missed; ``attention``: the arrays are those of attention itself."""
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
    """The missed gradients that no mistake of lse explains, which has a gradient too: in base 2 it counts 1 / ln 2 times."""
    names = [name for name in evidence.truth.exact if name in evidence.missed and name.startswith("d")]
    for counts in (1 / math.log(2), 0.0) if of_lse else ():
        right = evidence.exact(evidence.of_heads, counts)
        after = {name: evidence.error_of_heads(name, right[name]) for name in names}
        names = [name for name in names if not evidence.explained(name, evidence.error(name), after[name])]
    return names
