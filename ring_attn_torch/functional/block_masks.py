"""Conversion of a ``flex_attention`` BlockMask to ring arguments, by evaluation of its mask_mod at every pair of tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from hashlib import sha256
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ring_attn_core.data.dense_masks import BLOCK, HEADS_DIFFER, NEITHER, DenseMaskArguments, Hulls
from ring_attn_core.validation import in_words

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MAX_TOKENS = 32768
"""Largest number of queries, and of keys, for which a mask is evaluated at every pair."""

CONSTANT = ("builtins", "torch", "math", "operator")
"""Packages whose attributes are taken to be constant."""

REFLECTIVE = (globals, locals, vars, eval, exec, open)
"""Built-in functions through which code can read variables or files that it does not name."""

Shape = tuple[int, int, int, int]
"""Batch, heads, queries and keys."""

_known: WeakKeyDictionary[Any, tuple[Any, list[Any], DenseMaskArguments]] = WeakKeyDictionary()
"""For each evaluated BlockMask: its cache key, the objects that enter the key by id, and the result."""


def block_mask_arguments(block_mask: BlockMask, shape: Shape) -> DenseMaskArguments:
    """Convert a BlockMask of the global sequences to arguments of the ring. ``shape``: batch, heads, length and kv_length."""
    if torch.compiler.is_compiling():
        raise ValueError(
            "block_mask is evaluated on the host, which torch.compile cannot trace: leave flex_attention out of what is compiled "
            "with torch.compiler.disable, or call ring_attention with mask, extents and key_extents"
        )
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise ValueError(f"block_mask must be a BlockMask, made by create_block_mask, got {in_words(block_mask)}")
    batch, heads, queries, keys = shape
    rows = block_mask.kv_num_blocks.shape[-2::-1]  # heads, then the batch; either may be left out
    if any(n not in (1, m) for n, m in zip(rows, (heads, batch), strict=False)):
        raise ValueError(
            f"block_mask is for (heads, batch rows) = {tuple(rows)}, and the call has {(heads, batch)}: make it for as many, or "
            "with B=None and H=None if all see the same"
        )
    if tuple(block_mask.seq_lengths) != (queries, keys):
        raise ValueError(
            f"block_mask is for {' x '.join(map(str, block_mask.seq_lengths))} tokens, and the ring has length={queries} and "
            f"kv_length={keys}: make it for the whole sequence, and pass length= and kv_length= if the shards are padded"
        )
    if max(queries, keys) > MAX_TOKENS:
        raise ValueError(
            f"block_mask has {queries} x {keys} pairs to evaluate, and at most {MAX_TOKENS} tokens are: call "
            "ring_attention with mask, extents (document_extents, prefix_extents) and key_extents (tree_extents)"
        )
    held: list[Any] = []
    try:
        state = shape, _state(block_mask.mask_mod, held)
    except _Unknown:
        return _evaluate(block_mask, shape)
    if block_mask in _known and _known[block_mask][0] == state:
        return _known[block_mask][2]
    parts = _evaluate(block_mask, shape)
    _known[block_mask] = state, held, parts
    return parts


class _Unknown(Exception):
    """The error for a function that reads an object whose changes cannot be detected."""


def _state(x: Any, held: list[Any]) -> Any:
    """Return a key that changes with ``x`` and each tensor or number that its functions read, by digests, or raise _Unknown.
    ``held`` keeps alive the code objects and constants whose ids are in the key."""
    if x is None or isinstance(x, bool | int | float | str):
        return type(x), x
    if isinstance(x, Tensor):
        return _content(x)
    held.append(x)
    if isinstance(x, tuple | list):
        return type(x), tuple(_state(each, held) for each in x)
    if isinstance(x, FunctionType):
        if any(x is each for each in held[:-1]):
            return id(x)
        cells = [cell.cell_contents for cell in x.__closure__ or ()]
        scopes = x.__globals__, x.__builtins__, sys.modules  # the last one for imports within the function
        read = [scope[name] for name in _names(x.__code__) for scope in scopes if name in scope]
        held.append(x.__code__)
        own = *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *x.__dict__.values()
        return id(x.__code__), _state([*cells, *own, *read], held)
    if _is_constant(x):
        return id(x)
    raise _Unknown


def _content(x: Tensor) -> tuple[Any, ...]:
    """Return dtype, shape and a SHA-256 digest of a tensor's values. Raise _Unknown if it is not dense or has no values."""
    if x.layout is not torch.strided or x.is_nested or x.is_meta:
        raise _Unknown
    numbers = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return x.dtype, tuple(x.shape), sha256(numbers.numpy()).digest()


def _is_constant(x: Any) -> bool:
    """Return True if ``x`` is a module, class or built-in function of a ``CONSTANT`` package, but no ``REFLECTIVE`` function."""
    if isinstance(x, BuiltinFunctionType) and not isinstance(x.__self__, ModuleType | type | None):
        return False  # a method of some object
    name = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None) or "builtins"
    known = isinstance(x, ModuleType | BuiltinFunctionType | type) and name.partition(".")[0] in CONSTANT
    return known and x not in REFLECTIVE


def _names(code: CodeType) -> Iterator[str]:
    """Yield ``co_names`` of a function's code and of its inner functions: names of globals, attributes and imports."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _evaluate(block_mask: BlockMask, shape: Shape) -> DenseMaskArguments:
    """Evaluate the mask_mod at every pair, in blocks of queries, and convert the result to arguments of the ring."""
    from torch.nn.attention.flex_attention import create_mask

    device = block_mask.kv_num_blocks.device
    batch, heads, queries, keys = shape
    partial, full = (_list_blocks(block_mask, kind).expand(batch, heads, -1, -1) for kind in ("kv", "full_kv"))
    tall, wide = block_mask.BLOCK_SIZE
    key_blocks = torch.arange(keys, device=device) // wide
    step = max(BLOCK // max(batch * heads * keys, 1), 1)
    hulls = None
    for start in range(0, queries, step):
        rows = torch.arange(start, min(start + step, queries), device=device)
        shifted = lambda b, h, q_idx, kv_idx, start=start: block_mask.mask_mod(b, h, q_idx + start, kv_idx)
        try:
            seen = create_mask(shifted, batch, heads, len(rows), keys, device=device)  # type: ignore[arg-type]
        except Exception as error:
            raise ValueError(f"block_mask has a mask_mod that cannot be evaluated at every pair: {error}") from error
        tile_pairs = lambda blocks, rows=rows: blocks[:, :, rows // tall][..., key_blocks]
        if (seen & ~tile_pairs(partial | full)).any() or (~seen & tile_pairs(full)).any():
            raise ValueError(
                "block_mask lists blocks that contradict its mask_mod, so torch's results depend on the kernel: make it with "
                "create_block_mask, in a mask_mod that says everything"
            )
        if (seen != seen[:, :1]).any():
            raise ValueError(f"block_mask {HEADS_DIFFER}")
        alike = seen.stride(0) == 0  # the function does not read the batch row
        by_row = seen[:1, 0] if alike else seen[:, 0]
        hulls = hulls or Hulls(len(by_row), queries, keys)
        hulls.add(start, by_row.cpu().numpy())
    parts = (hulls or Hulls(1, queries, keys)).parts()
    if parts is None:
        raise ValueError(f"block_mask {NEITHER}")
    return parts


def _list_blocks(block_mask: BlockMask, kind: str) -> Tensor:
    """Return bool [batch, heads, query blocks, key blocks]: True for listed blocks of ``kind``, "kv" (partial) or "full_kv"."""
    partial = block_mask.kv_indices
    count, indices = getattr(block_mask, f"{kind}_num_blocks"), getattr(block_mask, f"{kind}_indices")
    if count is None or indices is None:
        return torch.zeros_like(partial, dtype=torch.bool)
    blocks = indices.shape[-1]
    used = torch.arange(blocks, device=indices.device) < count[..., None]
    listed = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.bool, device=indices.device)
    return listed.scatter(-1, indices.long().masked_fill(~used, blocks), True)[..., :blocks]
