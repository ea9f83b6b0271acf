"""PTX instructions for which Gluon has no function: conversions in pairs, and the tanh of the special function unit."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon import constexpr_function


@constexpr_function
def packing_text(dtype, positive):
    return f"cvt.rn{'.relu' if positive else ''}.{'bf16' if dtype.is_bf16() else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def packed_half(p, DTYPE: gl.constexpr, POSITIVE: gl.constexpr = False):
    """Return float32 rounded to DTYPE, two at a time: ``.to`` permutes bytes once more an element. POSITIVE makes negatives 0."""
    text: gl.constexpr = packing_text(DTYPE, POSITIVE)
    if DTYPE.is_bf16():
        half = gl.inline_asm_elementwise(text, "=r,r,r", [p], dtype=gl.bfloat16, is_pure=False, pack=2)
    else:
        half = gl.inline_asm_elementwise(text, "=r,r,r", [p], dtype=gl.float16, is_pure=False, pack=2)
    return half


@gluon.jit
def special_tanh(x):
    """Return tanh(x) by the special function unit: right to 1.2e-5, relatively (a test on GPUs), where 5e-4 are documented."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)
