"""What the layers of both packages work out from their arguments: sizes, masks, slopes, and whether a state fits a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .numbers import check_dropout_rate, check_softcap
from .runs import Band

Shapes = Mapping[str, tuple[int, ...]]


def check_sizes(**sizes: int) -> None:
    """ValueError for a size that is no int of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {size!r}")


def head_sizes(dim: int, heads: int, kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """(kv_heads, head_dim), where None means as many as query heads and ``dim / heads``.

    Raises ValueError where heads do not divide ``dim`` and no head_dim is given, and where kv_heads do not divide heads.
    """
    check_sizes(dim=dim, heads=heads)
    if head_dim is None:
        if dim % heads:
            raise ValueError(
                f"dim={dim} cannot be split over heads={heads}: choose a number of heads that divides dim, or pass head_dim, "
                "which need not be dim / heads"
            )
        head_dim = dim // heads
    kv_heads = heads if kv_heads is None else kv_heads
    check_sizes(kv_heads=kv_heads, head_dim=head_dim)
    if heads % kv_heads:
        raise ValueError(f"kv_heads={kv_heads} must divide heads={heads}: choose a divisor, 1 for multi-query attention")
    return kv_heads, head_dim


def check_rotary(head_dim: int, base: float) -> None:
    """ValueError for an odd head_dim, which has no pairs to rotate, and for a base of at most 1."""
    check_sizes(head_dim=head_dim)
    if head_dim % 2:
        raise ValueError(
            f"rotary embeddings turn pairs, so head_dim must be even, got {head_dim}: pass an even head_dim, or rotary_base=None "
            "for attention without positions"
        )
    if not base > 1:
        raise ValueError(
            f"the base of rotary embeddings must be greater than 1, got {base!r}: 10000.0 is usual, long contexts take more"
        )


def check_scores(softcap: float | None, sinks: bool, alibi: bool, dropout_rate: float) -> None:
    """ValueError for numbers outside their range: where the layer is made, and not only at its first call."""
    check_softcap(softcap)
    check_dropout_rate(dropout_rate)
    for name, flag in (("sinks", sinks), ("alibi", alibi)):
        if not isinstance(flag, bool):
            raise ValueError(
                f"{name} must be True or False, got {flag!r}: the layer makes the numbers itself, one for every head"
            )


def alibi_slopes(heads: int, head: Any = None) -> Any:
    """ALiBi's slope of every head (Press et al., arXiv:2108.12409, section 3), as floats.

        slope_h = 2 ** (-8 (h + 1) / p)            h < p, the greatest power of two up to heads
        slope_h = 2 ** (-8 (h - p + 1/2) / p)      the others lie between the first ones, as in the authors' released code

    ``head``: an array that holds 0, 1, ... heads - 1 in float64, of any framework: slopes come like it. Raises ValueError for
    heads that are no int of at least 1.
    """
    check_sizes(heads=heads)
    if head is None:
        return tuple(alibi_slopes(heads, head) for head in range(heads))
    power = 1 << (heads.bit_length() - 1)
    return 2.0 ** (-8 / power * (head + 1 - head // power * (power + 0.5)))


def layer_masks(mask: Band, windows: Sequence[int | None] | None, depth: int) -> list[Band]:
    """The mask of every layer: the part of ``mask`` within the layer's window, all of it where that, or ``windows``, is None.

    Raises ValueError for another number of windows than layers, and for one that is no int of at least 0.
    """
    if windows is None:
        return [mask] * depth
    if not isinstance(windows, Sequence) or len(windows) != depth:
        raise ValueError(
            f"windows must be a list of one value for each of {depth} layers, how many tokens before and after itself a token "
            f"sees, or None for all that the mask lets it, got {windows!r}"
        )
    for layer, window in enumerate(windows):
        if window is not None and (isinstance(window, bool) or not hasattr(window, "__index__") or window < 0):
            raise ValueError(
                f"windows[{layer}] must be an int of at least 0, 0 for a token that sees only itself, or None for all that the "
                f"mask lets it, got {window!r}"
            )
    return [mask if window is None else mask.within(window.__index__()) for window in windows]


def layer_offset(offset: Any, layer: int, heads: int) -> Any:
    """``dropout_offset`` of a layer, which draws as if its heads stood behind those of the layers before it.

    What is no pair comes back as it is: ring_attention refuses it.
    """
    if not isinstance(offset, tuple | list) or len(offset) != 2:
        return offset
    return offset[0], layer * heads + offset[1]


def hidden_size(dim: int) -> int:
    """8/3 of ``dim``, rounded up to a multiple of 64: three such matrices weigh as much as the two of a plain MLP of 4 dim."""
    return -(-8 * dim // (3 * 64)) * 64


def check_state(expected: Shapes, got: Shapes) -> None:
    """ValueError that lists every parameter that is missing, unexpected or of another shape."""
    problems = [f"{name} is missing" for name in expected if name not in got]
    problems += [f"{name} is unexpected" for name in got if name not in expected]
    problems += [
        f"{name} is {list(got[name])} and must be {list(shape)}"
        for name, shape in expected.items()
        if name in got and tuple(got[name]) != tuple(shape)
    ]
    if problems:
        listed = "; ".join(problems)
        raise ValueError(f"the state does not fit this module: {listed}. Build the module with the sizes the state was made with")
