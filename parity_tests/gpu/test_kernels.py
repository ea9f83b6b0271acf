"""The kernels on one GPU: every feature at sizes that fill tiles, exact in both frameworks, and equal in them to the bit."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalSubscript=false

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from ring_attn_core import causal, full, sliding_window
from ring_attn_core.reference.oracle import Attention

from ..support.balanced import LONG_CASES
from ..support.cases import SPECIAL, Case, check, check_future_unseen, check_kept, grid, one_hot, pairs
from ..support.combinations import COMBINATIONS, EVERYTHING
from .tolerance import TANH, bound_on_hopper

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LONG = [
    replace(case, length=length, kv_length=None, head_dim=64)
    for case, length in zip(COMBINATIONS, (307, 512, 611) * 99, strict=False)
]
"""The combinations at sizes of several tiles, an extent's and a window's edges within them."""

WIDE = [
    Case(length=391, ranks=2, head_dim=head_dim, v_dim=v_dim, dtype=dtype, heads=2, kv_heads=1, mask=mask)
    for head_dim, v_dim in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (17, 33), (128, 64), (512, 512))
    for dtype, mask in (("bfloat16", causal()), ("float16", sliding_window(100, 30)), ("float32", full()))
]
ENDS = [
    Case(length=1111, ranks=ranks, head_dim=dim, v_dim=dim, dtype=dtype, heads=2, kv_heads=1, key_mask="ends", mask=full())
    for ranks, dim, dtype in ((1, 128, "bfloat16"), (2, 64, "bfloat16"), (2, 64, "float32"), (2, 256, "bfloat16"))
]
"""Cases of a key mask that hides keys of only the first and the last tiles. The last two have tiles in two spans of it."""
CASES = [case for case in [*LONG, *WIDE, *EVERYTHING, *SPECIAL, *pairs(grid()), *ENDS] if case.dtype != "float64"]

WIDTHS = (64, 64), (128, 128), (96, 96), (128, 128), (192, 128), (256, 256)
HOPPER = [
    replace(case, dtype=dtype, head_dim=head_dim, v_dim=v_dim)
    for case, (head_dim, v_dim), dtype in zip(
        [*LONG, *EVERYTHING, *SPECIAL], WIDTHS * 99, ("bfloat16", "float16", "bfloat16") * 99, strict=False
    )
] + [case for case in [*WIDE, *ENDS] if case.dtype != "float32" and case.head_dim % 8 == 0 and case.head_dim <= 256]
"""The cases that Hopper's own kernels take, with every feature."""

OFTEN = [*WIDE, *EVERYTHING, *ENDS, *LONG[::3], *SPECIAL[::3]]
"""The cases of the portable kernels that are not exhaustive; of Hopper's they are those at the same places."""
JUDGED = [
    pytest.param(backend, case, marks=[] if source in OFTEN else pytest.mark.exhaustive)
    for backend, cases, sources in (("triton", CASES, CASES), ("hopper", HOPPER, [*LONG, *EVERYTHING, *SPECIAL, *WIDE * 2]))
    for case, source in zip(cases, sources, strict=False)
]

JUDGED += [pytest.param(backend, case) for backend in ("triton", "hopper") for case in LONG_CASES]


@pytest.mark.parametrize(("backend", "case"), JUDGED, ids=str)
def test_kernels_are_exact_and_the_same_in_both_frameworks_to_the_bit(backend, case, record_property, programs, passes):
    """Record the table of benchmarks/bits. Hopper's backward takes two passes if the case has an odd length."""
    from .emulate import on_jax, on_torch

    if case.length % 2 and case.head_dim > 64:
        passes(2)

    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    programs(3)
    case = replace(case, poison=True)
    ours, theirs = on_torch(case, backend), on_jax(case, backend)
    shares = check(case, ours, bound_on_hopper if backend == "hopper" else None)
    different = differing(ours, theirs)
    properties = {"case": str(case), "backend": backend, "shares": json.dumps(shares), "differing": json.dumps(different)}
    for name, value in properties.items():
        record_property(name, value)
    assert different == []


def differing(a: Attention, b: Attention) -> list[str]:
    """Return the names of the arrays that differ in a bit; dsinks are sums of the frameworks' own."""
    named = zip(Attention._fields, a, b, strict=True)
    return [name for name, x, y in named if name != "dsinks" and x is not None and not np.array_equal(x, y, equal_nan=True)]


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_dropout_keeps_the_set_of_the_truth(layout):
    from .emulate import on_torch

    case = one_hot(Case(layout, full(), ranks=2, length=244, v_dim=244, heads=2, dropout_rate=0.4))
    check_kept(case, on_torch(case).out)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_future_changes_nothing(ranks):
    from .emulate import on_torch

    case = Case(ranks=ranks, length=500, dtype="bfloat16", head_dim=64)
    check_future_unseen(on_torch(case), on_torch(case.with_other_future(201)), 201, case.length)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_is_the_single_launch(ranks):
    from ring_attn_core.reference.tolerance import relative_error

    from .emulate import on_torch

    case = Case(length=1200, dtype="bfloat16", head_dim=128, v_dim=128)
    one, ring = on_torch(replace(case, ranks=1)), on_torch(replace(case, ranks=ranks))
    for name, a, b in zip(Attention._fields, one, ring, strict=True):
        assert a is None or relative_error(a[:, :1200], b[:, :1200]) <= 3e-3, name


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [causal(), full(), sliding_window(3000, 100)], ids=str)
def test_the_hopper_forward_at_real_size_is_the_portable_one(dim, mask):
    """Every program takes some 15 tiles, all of them at the same time."""
    from ring_attn_torch import ring_attention

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    q, k, v, _ = arrays(length=16384, heads=16, kv_heads=4, dim=dim)
    ours, portable = (ring_attention(q, k, v, backend=backend, mask=mask).float() for backend in ("hopper", "triton"))
    assert (ours - portable).norm() / portable.norm() <= 5e-3


@pytest.mark.parametrize("feature", ["key_mask", "extents", "key_extents", "softcap", "alibi_slopes"])
def test_features_of_the_hopper_kernels_at_real_size_are_the_portable_ones(feature):
    from ring_attn_torch import ring_attention

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    given = arrays(length=16384, heads=4, kv_heads=1)
    token = torch.arange(16384, device="cuda", dtype=torch.int32)
    value = {
        "key_mask": ((token > 3000) & (token < 12000))[None],
        "extents": torch.stack([token // 2048 * 2048, token // 2048 * 2048 + 2048], -1)[None],
        "softcap": 30.0,
        "alibi_slopes": torch.tensor([0.5, 0.1, 0.01, -0.001], device="cuda"),
    }.get(feature)
    if feature == "key_extents":
        value = deep_tree(16384)
    both = [gradients(partial(ring_attention, backend=each, **{feature: value}), *given) for each in ("hopper", "triton")]
    for ours, portable in zip(*both, strict=True):
        assert (ours.float() - portable.float()).norm() <= 6e-3 * portable.float().norm()


def deep_tree(tokens):
    """Two trees whose segments have gaps between all their ancestors, more of them than a list of intervals holds."""
    from ring_attn_torch import tree_extents

    parents, deepest = [-1, *[0] * 20, -1], 21
    for _ in range(32):  # a leaf beside each segment of a chain
        parents += [deepest, deepest]
        deepest = len(parents) - 1
    lengths = np.diff(np.linspace(0, tokens, len(parents) + 1).astype(int))
    return tree_extents(parents, lengths.tolist()).key_extents.cuda()


def arrays(length=4096, heads=8, kv_heads=2, dim=128, dtype=torch.bfloat16):
    torch.manual_seed(0)
    make = lambda h: torch.randn(1, length, h, dim, device="cuda").to(dtype)
    return make(heads), make(kv_heads), make(kv_heads), make(heads)


def gradients(attend, q, k, v, dout):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def test_the_special_function_unit_makes_a_tanh_as_exact_as_is_said():
    """Hopper's kernels take it for softcap. Only 5e-4 is documented of it."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    from .tanh import tanh_of

    x = torch.cat([torch.linspace(-10, 10, 2**20), torch.logspace(-30, 4, 2**20)]).cuda()
    y = torch.empty_like(x)
    tanh_of[(len(x) // 1024,)](x, y, enable_fp_fusion=True)  # pyright: ignore[reportIndexIssue]
    exact = x.double().tanh()
    assert ((y.double() - exact).abs() <= TANH * exact.abs()).all()


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_the_same_bits_100_times_of_100(backend):
    from ring_attn_torch import ring_attention

    once = gradients(partial(ring_attention, backend=backend), *arrays())
    for _ in range(99):
        again = gradients(partial(ring_attention, backend=backend), *arrays())
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("heads", [(64, 8), (8, 8)], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_documents_have_the_same_bits_100_times_of_100_in_both_frameworks(dim, heads):
    import jax
    import jax.numpy as jnp

    from ring_attn_jax import ring_attention as jax_ring_attention
    from ring_attn_torch import ring_attention

    ends = np.cumsum(np.append(np.random.default_rng(0).integers(64, 700, 9), 4096)).clip(0, 4096)
    extents = np.stack([np.r_[0, ends][np.searchsorted(ends, np.arange(4096), "right")], np.arange(4096) + 1], -1)[None]
    given = arrays(heads=heads[0], kv_heads=heads[1], dim=dim)
    attend = partial(ring_attention, extents=torch.from_numpy(extents.astype(np.int32)).cuda())
    once = gradients(attend, *given)
    for _ in range(99):
        again = gradients(attend, *given)
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))

    def in_jax(dout, extents, *qkv):
        out, pull = jax.vjp(partial(jax_ring_attention, extents=extents, axis_name="seq"), *qkv)
        return out, *pull(dout)

    mesh, whole = jax.make_mesh((1,), ("seq",), (jax.sharding.AxisType.Auto,)), jax.sharding.PartitionSpec(None, "seq")
    program = jax.jit(jax.shard_map(in_jax, mesh=mesh, in_specs=whole, out_specs=whole))
    q, k, v, dout = (jnp.asarray(x.float().cpu().numpy(), jnp.bfloat16) for x in given)
    expected = [x.float().cpu().numpy() for x in once]
    for _ in range(100):
        found = program(dout, jnp.asarray(extents, jnp.int32), q, k, v)
        assert all((np.asarray(x, np.float32) == y).all() for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal_", [True, False])
def test_no_more_error_than_flash_attention_2(dim, causal_, backend, record_property):
    """Expect up to 0.4 % more error (xfail, for it has a reason), and fail for more than 0.5 %.

    The probability 1 of a score that is the maximum so far is not rounded. Tiles of 64 keys, as there, meet more maxima than
    our 128: in plain arithmetic too, out has 1.002 times the error, causal 1.004.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from ring_attn_torch import ring_attention

    given = arrays(dim=dim, kv_heads=8, length=2048)
    heads_first = lambda f: lambda q, k, v: f(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    ours = gradients(partial(ring_attention, backend=backend, mask=causal() if causal_ else full()), *given)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = gradients(heads_first(partial(scaled_dot_product_attention, is_causal=causal_)), *given)
    with sdpa_kernel(SDPBackend.MATH):
        truth = gradients(heads_first(partial(scaled_dot_product_attention, is_causal=causal_)), *(x.double() for x in given))
    ratios = {}
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), ours, theirs, truth, strict=True):
        mine, other = ((x.double() - c).norm().item() for x in (a, b))
        ratios[name] = mine / other
        record_property(name, mine / other)
    assert all(ratio <= 1.005 for ratio in ratios.values()), ratios
    if max(ratios.values()) > 1:
        pytest.xfail(f"the error beside FlashAttention-2's: {ratios}")
