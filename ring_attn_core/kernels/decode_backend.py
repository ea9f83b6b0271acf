"""The choice of the backend for decoding: the Triton kernels if they can run, else plain jnp or torch."""

from __future__ import annotations

import warnings
from functools import lru_cache

from ..problem.decode import Decode
from .backends import OLDEST_GPU
from .compile import broken_triton
from .decode_call import DecodeCall, call_of_decode
from .hopper.supports import WIDEST

BACKENDS = "triton", "blockwise"
"""The backends of decoding, in the order in which "auto" tries them."""


def objection(problem: Decode) -> str | None:
    """Return the reason, found without compiling, why the Triton kernels cannot decode a problem; None if no reason is found."""
    if not problem.capability:
        return f"its kernels run on NVIDIA GPUs, and these arrays are on {problem.device}"
    if problem.capability < OLDEST_GPU:
        return f"its kernels need a GPU of compute capability 8.0 (sm_80), and this one is sm_{problem.capability}"
    if (broken := broken_triton()) is not None:
        return broken
    if problem.dtypes[0] == "float64":
        return "its kernels take queries of bfloat16, float16 and float32, not float64"
    for name, width in (("head_dim", problem.q_shape[-1]), ("v_dim", problem.v_shape[-1])):
        if width > WIDEST:
            return f"its kernels take head sizes of at most {WIDEST}, and {name} is {width}"
    return None


@lru_cache(maxsize=4096)
def runnable_decode(problem: Decode) -> DecodeCall | None:
    """Compile the Triton kernels and return their parameters, or None if "blockwise" decodes; "auto" warns if they fail."""
    backend = problem.backend
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f'unknown backend {backend!r} for decoding: choose "auto" or one of {", ".join(BACKENDS)}')
    if backend == "blockwise":
        return None
    reason = objection(problem)
    if reason is None:
        from .obstacles import obstacle
        from .portable.launches import of_decode

        call = call_of_decode(problem)
        reason = obstacle(of_decode(call), problem.capability)
        if reason is None:
            return call
        if backend == "auto":
            warnings.warn(f"triton: in decoding {reason}. backend='blockwise' runs this instead, slower", stacklevel=2)
    if backend == "triton":
        raise ValueError(f'backend="triton" cannot decode this: {reason}. backend="blockwise" can')
    return None
