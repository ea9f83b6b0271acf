"""Wrappers of PTX instructions for which Gluon has no function: conversion of two elements at a time, and the fast tanh."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon import constexpr_function


@constexpr_function
def packing_text(dtype, positive):
    return f"cvt.rn{'.relu' if positive else ''}.{'bf16' if dtype.is_bf16() else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def packed_half(p, DTYPE: gl.constexpr, POSITIVE: gl.constexpr = False):
    """Round float32 to DTYPE by fewer byte permutations than ``x.to(DTYPE)``; POSITIVE makes negative values 0."""
    text: gl.constexpr = packing_text(DTYPE, POSITIVE)
    if DTYPE.is_bf16():
        half = gl.inline_asm_elementwise(text, "=r,r,r", [p], dtype=gl.bfloat16, is_pure=False, pack=2)
    else:
        half = gl.inline_asm_elementwise(text, "=r,r,r", [p], dtype=gl.float16, is_pure=False, pack=2)
    return half


@gluon.jit
def special_tanh(x):
    """Return tanh by the special function unit (tanh.approx): relative error at most 1.2e-5 as tested, 5e-4 by the PTX manual."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)
