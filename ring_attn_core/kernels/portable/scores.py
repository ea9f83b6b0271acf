"""Scores of a tile, in base 2.

    s_ij = args.softcap t_ij + slope log2(e) (k_pos - q_pos)         args.softcap = log2(e) softcap
    t_ij = tanh(args.inner q_i . k_j)                                args.inner = scale / softcap
    s_ij = args.inner q_i . k_j + slope log2(e) (k_pos - q_pos)      without softcap, where args.inner = log2(e) scale

Shapes     products, s and t [queries, keys] or [keys, queries]; i, j broadcast against them
Precision  f32; tanh has an absolute error of at most 5e-7, or with ACCURATE a relative error of a few roundings
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x, ACCURATE: tl.constexpr):
    """Return tanh with an absolute error of at most 5e-7, or with ACCURATE a relative error of a few roundings, also near 0. A
    multiprocessor computes 16 special functions per cycle, so a polynomial (error 8e-8) serves eight arguments up to 0.625. The
    bound assumes relative errors of 2^-22 in ex2.approx and 2^-23 in rcp.approx."""
    if ACCURATE:
        e = tl.exp2(tl.abs(x) * -2.8853900817779268)
        t = (1.0 - e) / (1.0 + e)
        square = x * x
        series = 1.0 + square * (-0.3333333333 + square * (0.1333333333 + square * (-0.0539682540 + square * 0.0218694885)))
        t = tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0, -t, t))
    elif INTERPRETED:
        t = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))
    else:
        t = tl.inline_asm_elementwise(TANH_OF_8, TANH_REGISTERS, [x], dtype=tl.float32, is_pure=True, pack=8)  # pyright: ignore[reportArgumentType]
    return t


def _tanh_of_8() -> str:
    """Return PTX that writes tanh of $8 .. $15 to $0 .. $7, by a minimax polynomial if all |x| <= 0.625, else by exp2."""
    each = lambda *lines: [line.format(y=f"y{n}", x=f"${8 + n}", to=f"${n}") for n in range(8) for line in lines]
    hexadecimal = lambda x: "0f" + struct.pack(">f", x).hex()
    c0, c1, c2, c3, c4 = map(hexadecimal, (0.99999946, -0.33330483, 0.13291034, -0.05136296, 0.01453019))
    return "\n".join([
        "{ .reg .pred p; .reg .f32 m, a, " + ", ".join(f"y{n}" for n in range(8)) + ";",
        f"mov.f32 m, {hexadecimal(0.0)};",
        *each("abs.f32 a, {x}; max.f32 m, m, a;"),
        f"setp.gtu.f32 p, m, {hexadecimal(0.625)}; @p bra far;",
        *each("mul.ftz.f32 {y}, {x}, {x};"),
        *each(f"fma.rn.ftz.f32 a, {{y}}, {c4}, {c3}; fma.rn.ftz.f32 a, a, {{y}}, {c2};"
              f" fma.rn.ftz.f32 a, a, {{y}}, {c1}; fma.rn.ftz.f32 a, a, {{y}}, {c0}; mul.ftz.f32 {{to}}, a, {{x}};"),
        "bra done; far:",
        *each(f"mul.ftz.f32 a, {{x}}, {hexadecimal(2.8853900817779268)}; ex2.approx.ftz.f32 a, a;"
              f" add.ftz.f32 a, a, {hexadecimal(1.0)}; rcp.approx.ftz.f32 a, a;"
              f" fma.rn.ftz.f32 {{to}}, a, {hexadecimal(-2.0)}, {hexadecimal(1.0)};"),
        "done: }",
    ])  # fmt: skip


TANH_OF_8 = tl.constexpr(_tanh_of_8())


TANH_REGISTERS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))


@triton.jit
def scores(products, i, j, slope, row, args, ACCURATE: tl.constexpr):
    """Return (s, t): the scores in base 2, and for the backward t = products * args.inner, with softcap the tanh of this.
    ``inner`` is scale log2(e), with softcap scale / softcap, and ``args.softcap`` is softcap log2(e)."""
    if args.softcap is None:
        s = products * args.inner
        t = s
    else:
        t = tanh(products * args.inner, ACCURATE)
        s = t * args.softcap
    if slope is not None:
        ahead = (row.k_start - row.q_start - row.stride * i).to(tl.float32) + (row.stride * j).to(tl.float32)
        s += (slope * LOG2E) * ahead
    return s, t
