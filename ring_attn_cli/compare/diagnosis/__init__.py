"""Likely causes of a missed bound (``diagnose``): each hypothesis is a generator, which yields sentences if it holds.

Most hypotheses assume a mistake and compute the result that it would give. Such a hypothesis holds if this result differs from
the measured one by at most a few times the bound, or by a small fraction of the measured error. The hypotheses about infinities,
NaN, ``out`` and dtypes are tested first; if one holds, only its sentence is reported, because other errors may follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ring_attn_core.masks import causal, full
from ring_attn_core.reference.oracle import plain, rounding, visible
from ring_attn_core.reference.tolerance import bound, relative_error
from ring_attn_core.runs import Band

from ..oracles import by_name, first_heads
from .dense import Backward, Dense
from .evidence import ROWS, Evidence, cosine, minimizer, nearest

LONGEST = 2048
"""Longest sequence, in tokens, for which dense gradients are computed. Dense matrices grow with the square of its length."""
NARROW = {"float64": ("float32", "float16", "bfloat16"), "float32": ("float16", "bfloat16"), "float16": ("bfloat16",)}
"""Narrower dtypes of each dtype, the most precise first. float16 also stands for tf32, which has as many fraction bits."""
LACKS = "the backward lacks delta = rowsum(dout * out){}: dq and dk are those of ds = p * {}, and ds = p * (dp - delta) is right"
OF_SHARDS = "its probabilities are exp(score - lse), with lse and delta of all keys, in the backward of every shard"
BACKWARDS = {
    Backward(delta=0.0): LACKS.format("", "(dp + dlse)"),
    Backward(delta=0.0, dlse=0.0): LACKS.format(" - dlse", "dp"),
    Backward(dlse=-1.0): "the gradient of lse has the wrong sign: delta is rowsum(dout * out) - dlse, and + dlse was computed",
    Backward(dlse=0.0, of_shards=True): f"the backward takes each shard's own out and lse: {OF_SHARDS}",
    Backward(of_shards=True): f"the backward takes each shard's own out and lse: {OF_SHARDS}",
}
FILL = "their scores were filled with a finite number such as -1e30, and its softmax is uniform"
FILLED = f"queries that see no key attend to all keys alike: {FILL}; out is 0 and lse -inf for such a query"


def diagnose(e: Evidence, attention: bool = True) -> list[str]:
    """Return the likely causes as sentences, one sentence if none is known; [] if no bound is missed.
    ``attention``: True if ``ring_attention`` computed the arrays; other variants are tested for fewer hypotheses."""
    if not e.missed:
        return []
    forward = not_finite, *((*OF_OUT * ("out" in e.missed), narrow_dtype, narrow_state, sees_nothing) if attention else ())
    if said := next((words for each in forward for words in each(e)), ""):
        return [said]
    found = [*of_lse(e)] if attention else []
    names = [name for name in e.truth.exact if name in e.missed and name.startswith("d")]
    for lse_counts in (1 / math.log(2), 0.0) if found else ():  # skip gradients that a wrong lse explains
        right = e.exact(lse_counts)
        names = [name for name in names if not e.explains(name, right[name])]
    if attention and {"dq", "dk"} & {*names} and (whole := wrong_backward(e)):
        found, names = [*found, whole[0]], [name for name in names if name not in whole[1]]
    found += [words for name in names if (words := next(lost_gradient(e, name, attention), ""))]
    return found or [f"no known mistake explains the error of {', '.join(e.missed)}"]


def not_finite(e: Evidence) -> Iterator[str]:
    """Name the results that hold NaN or infinite values, except an lse of -inf, the value of a fully masked query."""
    for name, (got, right) in ((name, e.pair(name)) for name in e.missed):
        if (wrong := np.isfinite(right) & ~np.isfinite(got) & ((name != "lse") | (got != -np.inf))).any():
            yield f"{name} holds {wrong.sum()} values that are NaN or infinite, the first at {np.argwhere(wrong)[0].tolist()}"


def sees_nothing(e: Evidence) -> Iterator[str]:
    """Test whether the lse of queries that see a key is -inf."""
    got, right = e.pair("lse") if "lse" in e.missed else (np.zeros(0), np.zeros(0))
    if (wrong := np.isfinite(right) & np.isneginf(got)).any():
        words = f"for {wrong.sum()} queries that see some, the first at {np.argwhere(wrong)[0].tolist()}"
        yield f"lse is -inf, that of a query that sees no key, {words}"


def alone(e: Evidence) -> Iterator[str]:
    """Test whether each rank attends to its own keys only, or the results of key shards are merged by a plain sum or mean."""
    if e.plan.ranks > 1:
        of = e.rank_of
        if e.explains_out(e.out(e.dense.seen & (of[e.dense.rows.start :, None] == of))):
            words = "out is that of each shard alone, so k and v do not travel around the ring"
            yield f"every rank attends to its own keys only: {words}"
        shards = [e.out(e.dense.seen & (of == rank)) for rank in range(e.plan.ranks)]
        for name, out in (("sum", np.sum(shards, 0)), ("mean", np.mean(shards, 0))):
            if e.explains_out(out):
                words = "each shard of keys gives alone, where that of a shard counts exp(lse of the shard - lse) times"
                yield f"shards are merged as if their softmaxes had the same denominator: out is the {name} of what {words}"


def finite_fill(e: Evidence) -> Iterator[str]:
    """Test whether masked scores are finite instead of -inf, which makes ``out`` wrong for fully masked queries only."""
    sees = np.isfinite(e.truth.exact["lse"])
    got, right = e.pair("out")
    if relative_error(got[sees], right[sees]) <= 4 * e.truth.bounds["out"] and e.is_mean_of_values(~sees[0].any(-1)):
        yield FILLED


def forgotten_feature(e: Evidence) -> Iterator[str]:
    """Test whether softcap, sinks, alibi_slopes or dropout_rate is ignored, or the ALiBi slopes have the wrong sign."""
    case, inputs, ignored = e.case, e.inputs.arrays, "{} is not looked at: out is that without it"
    off = ("softcap", None), ("dropout_rate", 0.0)
    tried = {ignored.format(n): (replace(case, **{n: x}), inputs) for n, x in off if getattr(case, n)}
    arrays = [name for name in ("sinks", "alibi_slopes") if name in inputs]
    tried |= {ignored.format(n): (case, {other: x for other, x in inputs.items() if other != n}) for n in arrays}
    if case.alibi:
        words = "the alibi_slopes have the other sign: a score gets slope * (k_pos - q_pos), which is negative for earlier keys"
        tried[words] = case, inputs | {"alibi_slopes": -inputs["alibi_slopes"]}
    for words, (other, arrays) in tried.items():
        if e.explains_out(Dense(other, arrays, e.dense.rows, case.heads).forward(case.factor).out):
            yield words


def wrong_scale(e: Evidence) -> Iterator[str]:
    """Test whether q . k has the wrong scale, from 1/64 to 64 times the right one."""
    right = e.case.factor
    out = lambda power: e.dense.forward(right * math.exp(power)).out
    power = minimizer(lambda power: relative_error(e.measured, out(power)), math.log(64))
    factor, root = math.exp(power), e.case.head_dim**0.5
    known = {root: "they were not scaled", 1 / root: "they were scaled twice"}
    known |= {1 / math.log(2): "exp2 stood for exp", math.log(2): "exp stood for exp2"}
    hint = next((f", as if {words}" for value, words in known.items() if abs(factor / value - 1) < 1e-3), "")
    if abs(power) >= 1e-5 and e.explains_out(out(power)):
        said = f"scores are multiplied by {right * factor:.6g} where {right:.6g} was said"
        yield f"the scale is wrong: {said}, {factor:.4g} times as much{hint}"


def heads(e: Evidence) -> Iterator[str]:
    """Test whether the heads of out are permuted, or query heads read the wrong key heads."""
    got, right = e.pair("out")
    order, worst = nearest([*np.moveaxis(got, 2, 0)], [*np.moveaxis(right, 2, 0)])
    changed = [h for h, other in enumerate(order) if other != h]
    if changed and len({*order}) == len(order) and e.explained("out", e.error("out"), worst):
        words = f"head {changed[0]} holds what head {order[changed[0]]} should, and in all they come as {str(order)[1:-1]}"
        yield f"the heads of out are in another order: {words}: look for a transposed reshape of (kv_heads, heads / kv_heads)"
    expected, count = e.dense.reads.tolist(), e.dense.heads
    outs = [e.dense.forward(e.case.factor, reads=np.full(count, head)).out for head in range(e.case.kv_heads)]
    found = [nearest([e.measured[:, h]], [out[:, h] for out in outs]) for h in range(count)]
    reads, worst = [head for (head,), _ in found], max(error for _, error in found)
    if reads != expected and e.explained("out", e.error("out"), worst):
        words = f"0 to {count - 1} read key heads {str(reads)[1:-1]}, expected {str(expected)[1:-1]}, h // (heads / kv_heads)"
        yield f"query heads read the wrong key heads: {words}"


def wrong_mask(e: Evidence) -> Iterator[str]:
    """Test whether queries see wrong keys, such as padding."""
    for words, visible_from in _masks(e):
        seen = visible_from(e.dense.rows)
        judged = seen.any(-1)  # the out of a fully masked query is arbitrary
        if 2 * judged.sum() >= len(judged) and e.explains_out(e.out(seen), judged):
            early = visible_from(range(min(ROWS, e.case.length))).any(-1)
            yield f"the mask is wrong: {words}{'; and ' + FILLED if e.is_mean_of_values(~early) else ''}"
    padding = e.plan.ranks * e.plan.seq_local - e.case.length
    if padding and not e.case.alibi:
        share = 1 / (1 + padding * np.exp(-e.right.lse))  # padding has keys of zeros, whose scores are 0
        if e.explains_out(e.right.out * share[..., None]):
            yield f"padding is attended to: hide the keys whose positions are not below length, {padding} here"


def _masks(e: Evidence) -> Iterator[tuple[str, Callable[[range], np.ndarray]]]:
    """Yield (description, mask) for plausible wrong masks: mask(rows) is bool [len(rows), keys] for a range of queries."""
    case, band, said = e.case, e.case.band, f", where {e.case.mask} was said"
    inputs = [e.inputs.arrays[name][:1] if name in e.inputs.arrays else None for name in ("extents", "key_mask")]
    mask = lambda band, inputs: lambda rows: visible(band, rows, range(case.length), *inputs)[0]
    if e.plan.ranks > 1 and case.layout != "contiguous":
        place = np.argsort([x for rank in range(e.plan.ranks) for x in e.plan.positions(rank)])[: case.length]  # in all shards
        low, high = -math.inf if band.lo is None else band.lo, math.inf if band.hi is None else band.hi
        lag = lambda rows: place[rows.start : rows.stop, None] - place
        words = f"shards are taken for contiguous ones and are {case.layout}: positions(layout, ranks, length, rank) says where"
        seen = lambda rows: (lag(rows) >= low) & (lag(rows) <= high) & mask(full(), inputs)(rows)
        yield f"{words} their tokens stand", seen
    flip = lambda side: None if side is None else -side
    bands = {"there is none": full(), "out is that of causal": causal()}
    bands |= {"q_pos - k_pos has the other sign": Band(flip(band.hi), flip(band.lo))}
    for step, amount in ((-1, "one key more"), (1, "one key less")):
        if band.lo is not None:
            after = "no query sees itself" if band.lo + step == 1 else f"each query sees {amount} after it"
            bands[after] = Band(band.lo + step, band.hi)
        if band.hi is not None:
            bands[f"each query sees {amount} before it"] = Band(band.lo, band.hi - step)
    yield from ((words + said, mask(other, inputs)) for words, other in bands.items() if other != band)
    for at, name in enumerate(("extents", "key_mask")):
        if inputs[at] is not None:
            yield f"{name} is not looked at", mask(band, [None if i == at else x for i, x in enumerate(inputs)])


OF_OUT = alone, finite_fill, forgotten_feature, wrong_scale, heads, wrong_mask
"""The hypotheses about a wrong out, in the order of their tests. Only the first sentence that one of them yields is reported."""


def narrow_dtype(e: Evidence) -> Iterator[str]:
    """Test whether the errors are those of plain attention in a narrower dtype than the case's."""
    names = [name for name in ("out", "dq", "dk", "dv") if name in e.missed]
    right, arrays = e.exact(), first_heads(e.case, e.inputs, e.cotangents)
    error = {name: e.error(name, right[name]) for name in names}
    for dtype in NARROW.get(e.case.dtype, ()) if names else ():
        keep = (lambda x: x.astype(np.float32)) if dtype == "float32" else rounding(dtype)
        rounded = {n: keep(x.astype(np.float32)) if n in ("q", "k", "v", "dout") else x for n, x in arrays.items()}
        rough = by_name(plain(**rounded, mask=e.case.band, dtype=dtype, **e.case.scalars))
        usual = {n: relative_error(rough[n], right[n]) for n in names}
        if all(usual[n] / 10 <= error[n] <= bound(rough[n], right[n], dtype) for n in names):
            name, got = names[0], e.got[names[0]]
            held = np.array_equal(keep(got.astype(np.float32)), got)
            if held or cosine(e.part(name, right[name]) - right[name], rough[name] - right[name]) > 0.3:
                called = "float16 (or tf32)" if dtype == "float16" else dtype
                also = f"and every value of {name} is a {dtype} number" if held else "and rounds alike"
                words = f"{name} has an error of {error[name]:.1e}, plain attention in {dtype} has {usual[name]:.1e}, {also}"
                yield f"{called} where {e.case.dtype} was said: {words}"


def narrow_state(e: Evidence) -> Iterator[str]:
    """Test whether the softmax of 16-bit inputs is computed in 16 bits instead of float32."""
    dtype, exact = e.case.dtype, e.truth.exact["lse"]
    if dtype in ("bfloat16", "float16") and "lse" in e.missed:
        keep = rounding(dtype)
        (got, right), right_out = e.pair("lse"), "out" not in e.missed or e.error("out") <= 8 * e.truth.bounds["out"]
        narrow = np.array_equal(keep(got.astype(np.float32)), got)
        if right_out and narrow and e.error("lse") <= 8 * relative_error(keep(right.astype(np.float32)), exact):
            words = "Scores, exponentials, sums and lse belong in float32, whatever the inputs are"
            yield f"the softmax is computed in {dtype}: every value of lse is a {dtype} number. {words}"


def of_lse(e: Evidence) -> Iterator[str]:
    """Test whether lse is in base 2 (as inside kernels) or off by a constant, and whether dq and dk lack the term of dlse."""
    if "lse" in e.missed:
        got, right = e.pair("lse")
        finite = np.isfinite(right) & np.isfinite(got)
        offset = float(np.median((got - right)[finite])) if finite.any() else 0.0
        if e.explained("lse", e.error("lse"), relative_error(got * math.log(2), right)):
            yield "lse is in base 2: it is 1 / ln 2 = 1.4427 times the natural logarithm, so multiply it by ln 2"
        elif e.explained("lse", e.error("lse"), relative_error(got - offset, right)):
            yield f"lse is {offset:+.6g} off everywhere, while out is right: the running maximum or a constant is missing in it"
    names = [name for name in ("dq", "dk") if name in e.missed and "lse" in e.cotangents]
    right = e.exact(lse_counts=0.0) if names else {}
    if names and all(e.explains(name, right[name]) for name in names):
        yield f"lse has lost its gradient: {' and '.join(names)} are those of out alone"


def wrong_backward(e: Evidence) -> tuple[str, set[str]] | None:
    """Return (mistake, gradients that it explains) if a known mistake explains all wrong gradients among dq and dk, else None."""
    names = {"dq", "dk", "dv"} & {*e.missed}
    for backward, words in BACKWARDS.items() if "out" not in e.missed and e.plan.length <= LONGEST else ():
        if (backward.of_shards and e.plan.ranks == 1) or ("lse" not in e.cotangents and backward.dlse != 1):
            continue
        wrong = {n: x.sum(0)[None] if n == "dq" else x.sum(0)[None, :, None] for n, x in e.parts(backward).items()}
        explained = {name for name in names if e.explains(name, wrong[name])}
        if names - {"dv"} <= explained:
            return words, explained
    return None


def lost_gradient(e: Evidence, name: str, attention: bool) -> Iterator[str]:
    """Test whether a gradient is zero, wrongly scaled, misplaced, or a sum that weights the ranks' contributions wrongly."""
    got, right = e.pair(name)
    fits = lambda wrong: e.explained(name, e.error(name), relative_error(got - wrong + right, right))
    if not got.any():
        yield f"{name} is zero everywhere: the gradient is lost (a detach, a stop_gradient, or a backward that returns none)"
    factor = float((got * right).sum() / (right * right).sum())
    if fits(factor * right):
        yield f"{name} is {factor:.4g} times what it should be{_reason(e, name, factor, attention)}"
    shards = [e.rank_of == rank for rank in range(e.plan.ranks)] if name in ("dq", "dk", "dv") else []
    mine, theirs = ([x[:, at] for at in shards] or [x] for x in (got, right))
    if len({x.shape for x in mine}) == 1:  # without padding, shards of different lengths cannot be exchanged
        holds, worst = nearest(mine, theirs)
        if (moved := [pair for pair in enumerate(holds) if pair[0] != pair[1]]) and e.explained(name, e.error(name), worst):
            words = ", ".join(f"rank {rank} that of rank {other}" for rank, other in moved)
            yield f"{name} comes home to the wrong ranks: {words}"
    factors = np.array([(a * b).sum() / (b * b).sum() if b.any() else 1.0 for a, b in zip(mine, theirs, strict=True)])
    off = [f"{factors[rank]:.4g} times what it should be on rank {rank}" for rank in np.flatnonzero(abs(factors - 1) > 1e-2)]
    if len(shards) > 1 and off and fits(factors[e.rank_of][:, None, None] * right):
        yield f"{name} is wrong on {'one rank' if len(off) == 1 else 'some ranks'}: {', '.join(off)}"
    # Large samples of one distribution are alike once sorted, and so are slightly noisy numbers: hence 1e-4, and 0.1 below.
    order = relative_error(*(np.concatenate([np.sort(x, None) for x in side]) for side in (mine, theirs)))
    if e.error(name) >= 0.1 and order <= min(4 * e.truth.bounds[name], 1e-4):
        where = "torch.distributed.nn.functional.all_gather does so with gradients under gloo, ring_attn_torch.gather not"
        words = f"dimensions are exchanged, or memory that is not contiguous is read as if it were ({where})"
        yield f"{name} holds the right numbers in another order: {words}"
    counts = e.counted_parts(name) if attention and len(shards) > 1 and e.plan.length <= LONGEST else None
    if counts is not None:
        givers, off = "keys" if name == "dq" else "queries", np.argwhere(np.abs(counts - 1) > 0.02)
        if len(off) and np.nanmax(np.abs(counts - np.eye(len(counts)))) <= 0.02:
            words = f"every rank has what its own {givers} give, and those of the other ranks are lost"
            yield f"{name} is one rank's part only: {words}"
        words = [f"rank {b}'s {givers} count {counts[a, b]:.3g} times for rank {a}'s tokens" for a, b in off]
        if words:
            yield f"{name} is put together wrongly: {'; '.join(words[:4])}{' and so on' if len(words) > 4 else ''}"


def _reason(e: Evidence, name: str, factor: float, attention: bool) -> str:
    """Return the likely reasons why a gradient is ``factor`` times the right one, as text that ends a sentence, or ""."""
    ranks, known, right, beside = e.plan.ranks, [], e.truth.exact[name], {} if e.alone is None else e.alone
    same = name in beside and relative_error(e.part(name, right, beside), factor * right) < 1e-2
    where = ", on one device too" if same else ""
    if ranks > 1 and not where:
        known += [(1 / ranks, "averaged over the ranks where it should be summed"), (ranks, "summed once more over the ranks")]
    if attention and name in ("dq", "dk"):
        known += [(1 / e.case.factor, "the scale is missing in it"), (e.case.factor, "scaled twice")]
    hints = [words for value, words in known if abs(factor / value - 1) < 1e-2]
    return where + (f": {', or '.join(hints)}" if hints else "")
