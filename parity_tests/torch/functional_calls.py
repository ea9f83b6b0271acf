"""Random calls of the functions of ring_attn_torch.functional."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import bias
from torch.nn.attention import flex_attention as flex

from ring_attn_torch import functional

from ..support.functional import DTYPES, LAYOUTS, Call, drawn_arrays, drawn_mask, fitting


def draw(name: str, seed: int) -> Call:
    """One of many calls of the function called ``name``."""
    rng = random.Random(f"{name} {seed}")
    return DRAWS[name](rng, np.random.default_rng(seed))


def _sizes(rng: random.Random, most: int = 23) -> tuple[int, int, int, int, int, int]:
    batch, kv_heads, share, queries = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 2)), rng.randint(1, most)
    keys = queries if rng.random() < 0.5 else rng.randint(1, most)
    return batch, queries, keys, kv_heads * share, kv_heads, rng.choice((4, 5, 8))


def _call(rng: random.Random, generator: np.random.Generator, name: str, sizes: tuple[int, int, int, int, int, int]) -> Call:
    dtype = rng.choice(DTYPES)
    everything = np.ones((1, sizes[1], sizes[2]), bool)
    return Call(name, drawn_arrays(generator, sizes, dtype), everything, {}, dtype, rng.choice(list(LAYOUTS)))


def _refusals(rng: random.Random, call: Call, refused: dict[str, tuple[Any, str]]) -> Call:
    """Give the call an argument that is refused, one time in eight. ``refused``: values and words by argument."""
    if call.refused is None and rng.random() < 1 / 8:
        name = rng.choice(list(refused))
        call.arguments[name], call.refused = refused[name]
    return call


def _flash_options(rng: random.Random, call: Call) -> tuple[float, float]:
    """Draw what flash_attn's two functions share; return the sides of the window, inf if open."""
    causal = rng.random() < 0.5
    left, right = (-1 if rng.random() < 0.5 else rng.randint(0, 7) for _ in range(2))
    if causal or rng.random() < 0.5:
        call.arguments["causal"] = causal
    if left >= 0 or right >= 0:
        call.arguments["window_size"] = (left, right)
    if rng.random() < 0.3:
        call.arguments["softmax_scale"] = call.scale = rng.uniform(0.1, 0.8)
    if rng.random() < 0.3:
        call.arguments["softcap"] = call.softcap = rng.uniform(0.5, 3)
    if rng.random() < 0.3:
        call.arguments["deterministic"] = rng.random() < 0.5
    call.arguments["return_attn_probs"] = call.lengths[0] % 2 == 0
    sides = np.inf if left < 0 else left, 0 if causal else np.inf if right < 0 else right
    if rng.random() < 0.25:
        heads = call.arrays["q"].shape[2]
        call.slopes = np.array([rng.randint(1, 64) / 64 for _ in range(heads)], np.float32)
        call.arguments["alibi_slopes"] = torch.from_numpy(call.slopes)
        if sides[1] != 0:
            call.refused = "alibi_slopes without causal=True"
    return sides


FLASH_REFUSED = {
    "return_attn_probs": (1, "return_attn_probs must be True or False"),
    "dropout_p": (0.1, "dropout_p=0.1 needs dropout_seed="),
    "window_size": (3, "window_size must be"),
    "deterministic": (1, "deterministic must be True or False"),
    "softcap": (-1.0, "softcap must be"),
}


def _window(queries: int, keys: int, sides: tuple[float, float]) -> np.ndarray:
    """bool [queries, keys]: FlashAttention's rule, aligned to the bottom right."""
    aligned, key = np.arange(queries)[:, None] + keys - queries, np.arange(keys)
    return (key >= aligned - sides[0]) & (key <= aligned + sides[1])


def _draw_flash(rng: random.Random, generator: np.random.Generator) -> Call:
    call = _call(rng, generator, "flash_attn_func", _sizes(rng))
    sides = _flash_options(rng, call)
    queries, keys = call.lengths
    call.visible = _window(queries, keys, sides)[None]
    if call.slopes is not None and queries != keys and call.refused is None:
        call.refused = "alibi_slopes need queries and keys of one length"
    _refuse_undocumented(call, sides, queries, keys)
    return _refusals(rng, call, FLASH_REFUSED)


def _refuse_undocumented(call: Call, sides: tuple[float, float], queries: int, keys: int) -> None:
    """Expect a refusal where flash_attn's kernels show a query other keys than its documented rule."""
    left, right = sides
    taken = np.inf if right >= keys else right
    taken = keys if left < keys and taken == np.inf else taken
    if taken != right and not (_window(queries, keys, (left, taken)) == _window(queries, keys, sides)).all():
        call.refused = call.refused or "flash_attn computes another window"


def _draw_varlen(rng: random.Random, generator: np.random.Generator) -> Call:
    documents, same = rng.randint(0, 4), rng.random() < 0.4
    counts = [[rng.randint(0, 7) for _ in range(documents)] for _ in range(2)]
    counts[1] = counts[0] if same else counts[1]
    more = [rng.choice((0, 0, 3)) for _ in range(2)]
    totals = [max(sum(each) + m, 1) for each, m in zip(counts, more, strict=True)]
    kv_heads = rng.choice((1, 2))
    sizes = 1, totals[0], totals[1], kv_heads * rng.choice((1, 2)), kv_heads, rng.choice((4, 5))
    call = _call(rng, generator, "flash_attn_varlen_func", sizes)
    sides = _flash_options(rng, call)
    ends = [np.cumsum([0, *each]).astype(np.int32) for each in counts]
    call.visible = np.zeros((1, *totals), bool)
    for (q0, q1), (k0, k1) in zip(*map(pairwise, ends), strict=True):
        call.visible[0, q0:q1, k0:k1] = _window(q1 - q0, k1 - k0, sides)
    cu_q, cu_k = map(torch.from_numpy, ends)
    longest = [max(each, default=0) for each in counts]
    call.arguments |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": longest[0], "max_seqlen_k": longest[1] + 2}
    if call.slopes is not None and counts[0] != counts[1] and call.refused is None:
        call.refused = "alibi_slopes need queries and keys of one length"
    _refuse_undocumented(call, sides, longest[0], longest[1] + 2)
    wrong = {
        "cu_seqlens_q": (cu_q + 1, "cu_seqlens_q must be 0|cu_seqlens_q ends at"),
        "cu_seqlens_k": (torch.cat([cu_k, cu_k[-1:] + 40]), "cu_seqlens_k ends at"),
        "block_table": (cu_q, "block_table pages a cache"),
        "max_seqlen_q": (-1, "max_seqlen_q must be") if documents else (None, "max_seqlen_q must be"),
    }
    return _refusals(rng, call, wrong | FLASH_REFUSED)


def _draw_sdpa(rng: random.Random, generator: np.random.Generator) -> Call:
    call = _call(rng, generator, "scaled_dot_product_attention", _sizes(rng))
    (batch, queries, heads, _), (_, keys, kv_heads, _) = (call.arrays[name].shape for name in "qk")
    if rng.random() < 0.3:
        call.arguments["scale"] = call.scale = rng.uniform(0.1, 0.8)
    if kv_heads != heads or rng.random() < 0.3:
        call.arguments["enable_gqa"] = True
    way = rng.choice(("none", "is_causal", "bias", *["mask"] * 5))
    if way == "mask":
        kind = fitting(rng, heads, queries, keys)
        mask = drawn_mask(rng, kind, batch, heads, queries, keys)
        call.visible = mask[:, 0]
        shaped = torch.from_numpy(np.ascontiguousarray(mask))
        shaped = rng.choice((shaped, shaped.expand(batch, heads, -1, -1)))
        shaped = shaped[0, 0] if len(mask) == 1 and kind != "heads" and rng.random() < 0.5 else shaped
        kept = torch.zeros(shaped.shape, dtype=getattr(torch, call.dtype)).masked_fill(~shaped, -torch.inf)
        call.arguments["attn_mask"] = shaped if rng.random() < 0.6 else kept
        call.refused = {"heads": "attn_mask differs between heads", "holes": "attn_mask is neither a band"}.get(kind)
    elif way == "is_causal":
        call.arguments["is_causal"] = True
        call.visible = drawn_mask(rng, "causal", 1, 1, queries, keys)[0]
    elif way == "bias":
        lower = rng.random() < 0.5 and queries <= keys  # of more queries torch warns that it makes NaN
        call.arguments["attn_mask"] = (bias.causal_lower_right if lower else bias.causal_upper_left)(queries, keys)
        call.visible = drawn_mask(rng, "bottom right" if lower else "causal", 1, 1, queries, keys)[0]
    refused = {
        "attn_mask": (torch.full((queries, keys), 0.5), "attn_mask adds numbers|beside is_causal=True"),
        "dropout_p": (0.1, "dropout_p=0.1 needs dropout_seed="),
    }
    if kv_heads != heads:
        refused["enable_gqa"] = False, "pass enable_gqa=True"
    if "attn_mask" in call.arguments:
        refused["is_causal"] = True, "attn_mask beside is_causal=True"
    return _refusals(rng, call, refused)


def _draw_flex(rng: random.Random, generator: np.random.Generator) -> Call:
    call = _call(rng, generator, "flex_attention", _sizes(rng))
    (batch, queries, heads, _), (_, keys, kv_heads, _) = (call.arrays[name].shape for name in "qk")
    if rng.random() < 0.3:
        call.arguments["scale"] = call.scale = rng.uniform(0.1, 0.8)
    if kv_heads != heads:
        call.arguments["enable_gqa"] = True
    if rng.random() < 0.8:
        kind = fitting(rng, heads, queries, keys)
        mask = drawn_mask(rng, kind, batch, heads, queries, keys)
        call.visible = mask[:, 0]
        call.arguments["block_mask"] = _block_mask(mask, rng.choice((3, 128)))
        call.refused = {"heads": "block_mask differs between heads", "holes": "block_mask is neither a band"}.get(kind)
    spelled = rng.choice(("none", "softcap", "their softcap", "alibi", "their alibi"))
    if spelled.endswith("softcap"):
        call.softcap = rng.uniform(0.5, 3)
        call.arguments["score_mod"] = functional.softcap(call.softcap) if spelled == "softcap" else _softcap(call.softcap)
    elif spelled.endswith("alibi"):
        call.slopes = np.array([rng.randint(1, 64) / 64 for _ in range(heads)], np.float32)
        slopes = torch.from_numpy(call.slopes)
        call.arguments["score_mod"] = functional.alibi(slopes) if spelled == "alibi" else _alibi(slopes)
    call.arguments["return_lse"] = rng.random() < 0.5
    refused = {
        "score_mod": rng.choice(OTHER_SCORES),
        "kernel_options": ({"BLOCK_M": 64}, "kernel_options tune"),
        "block_mask": (
            flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, queries + 1, keys, "cpu"),
            "block_mask is for",
        ),
        "return_aux": (flex.AuxRequest(max_scores=True), "return_aux asks for max_scores|return_lse beside return_aux"),
    }
    return _refusals(rng, call, refused)


def _block_mask(mask: np.ndarray, block: int) -> flex.BlockMask:
    """A BlockMask that reads its visible pairs from a tensor."""
    visible, (batch, heads) = torch.from_numpy(np.ascontiguousarray(mask)), mask.shape[:2]
    if batch == heads == 1:
        of = lambda b, h, q_idx, kv_idx: visible[0, 0, q_idx, kv_idx]
    elif heads == 1:
        of = lambda b, h, q_idx, kv_idx: visible[b, 0, q_idx, kv_idx]
    else:
        of = lambda b, h, q_idx, kv_idx: visible[0, h, q_idx, kv_idx]
    sizes = (None if batch == 1 else batch, None if heads == 1 else heads, *mask.shape[2:])
    return flex.create_block_mask(of, *sizes, device="cpu", BLOCK_SIZE=block)


def _softcap(cap: float) -> Callable[..., Tensor]:
    def capped(score, batch, head, q, k):
        score = score / cap
        score = torch.tanh(score)
        return score * cap

    return capped


def _alibi(slopes: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, q_idx, kv_idx: (kv_idx - q_idx) * slopes[h] + score


OTHER = "score_mod computes something else"
OTHER_SCORES = (
    (lambda score, b, h, q, k: score + (q - k), OTHER),
    (lambda score, b, h, q, k: score * 2, OTHER),
    (lambda score, b, h, q, k: 2 * torch.tanh(score / 3), OTHER),
    (lambda score, b, h, q, k: torch.where(q >= k, score, -torch.inf), OTHER),
    (lambda score, b, h, q, k: score if h > 1 else -score, "score_mod cannot be traced"),
    ("softcap", "score_mod must be a function"),
)


DRAWS = {
    "flash_attn_func": _draw_flash,
    "flash_attn_varlen_func": _draw_varlen,
    "scaled_dot_product_attention": _draw_sdpa,
    "flex_attention": _draw_flex,
}
