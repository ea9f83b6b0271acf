"""A small layer and a small transformer: sizes, weights and data in numpy, and the layer's mathematics without any framework."""

from __future__ import annotations

from typing import Any

import numpy as np

from ring_attn_core import Band, causal, full, sliding_window
from ring_attn_core.model.alibi import alibi_slopes
from ring_attn_core.model.rotary import Llama3, Rotary, YaRN
from ring_attn_core.reference import dilated
from ring_attn_core.reference.oracle import Attention, exact, plain
from ring_attn_core.reference.tolerance import bound, relative_error

Arrays = dict[str, np.ndarray]

LENGTH, BATCH, VOCAB = 37, 2, 31
LAYER: dict[str, Any] = {"dim": 24, "heads": 4, "kv_heads": 2, "head_dim": 8}
TRANSFORMER: dict[str, Any] = {"vocab": VOCAB, "depth": 2, "hidden": 40, **LAYER}
PACKED: dict[str, Any] = TRANSFORMER | {
    "dim": 32,
    "depth": 3,
    "windows": (6, 20, None),
    "rotary_base": 100.0,
    "softcap": 3.0,
    "sinks": True,
    "alibi": True,
    "dropout_rate": 0.1,
}
"""A transformer with a window per layer and every other feature of attention."""
NEW: dict[str, Any] = {
    "qk_norm": True,
    "qkv_bias": True,
    "eps": 0.01,
    "rotaries": (Rotary(100.0, Llama3(4.0, 1.0, 4.0, 64)), Rotary(50.0, YaRN(3.0, 16))),
    "windows": (7, None),
}
"""The features of a model besides attention's own, of a size that shows in the logits."""
EVERYTHING: dict[str, Any] = PACKED | NEW | {"rotaries": (*NEW["rotaries"], 1e4), "windows": PACKED["windows"], "tied": False}
EVERYTHING.pop("rotary_base")

MIDDLE = LENGTH // 2

CALLED = "extents", "key_mask", "dropout_seed", "context", "context_length"
"""The arguments of RingAttention's call; the others belong to its constructor."""


def arguments_of_attention() -> dict[str, dict[str, Any]]:
    """Return every argument of RingAttention that changes the result, and all at once; arrays in natural order."""
    first = np.where(np.arange(LENGTH) < 20, 0, 17)  # two overlapping documents and padding
    extents = np.stack([first, first + 20], -1) * (np.arange(LENGTH) < 33)[:, None]
    each = {
        "softcap": {"softcap": 0.7},
        "sinks": {"sinks": True},
        "alibi": {"alibi": True, "rotary_base": None},
        "dropout": {"dropout_rate": 0.3, "dropout_seed": 5},
        "extents": {"extents": np.stack([extents, extents[::-1].copy()]).astype(np.int32)},
        "key_mask": {"key_mask": np.random.default_rng(5).random((BATCH, LENGTH)) < 0.6, "mask": sliding_window(9, after=4)},
    }
    return each | {"everything": {name: x for arguments in each.values() for name, x in arguments.items()}}


def dilated_arguments() -> dict[str, dict[str, Any]]:
    """Return patterns of DilatedRingAttention with other arguments; none divides the sequence, and one leaves tokens out."""
    key_mask = np.random.default_rng(5).random((BATCH, LENGTH)) < 0.6
    return {
        "softmax": {"segments": (6, 20, 64), "dilations": (1, 2, 4)},
        "heads": {"segments": (7, 30), "dilations": (1, 5), "mixing": "heads", "mask": full(), "rotary_base": None},
        "hidden keys": {"segments": (8, 24), "dilations": (2, 3), "mask": full(), "key_mask": key_mask, "softcap": 0.7},
        "window": {"segments": (5, 40), "dilations": (1, 4), "mask": sliding_window(9, after=4), "key_mask": key_mask},
    }


def made_and_called(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of RingAttention's constructor, and of its call."""
    return {n: x for n, x in arguments.items() if n not in CALLED}, {n: x for n, x in arguments.items() if n in CALLED}


def projections(sizes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of RingAttention's parameters."""
    dim, q, kv = sizes["dim"], sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    shapes = {"q.weight": (q, dim), "k.weight": (kv, dim), "v.weight": (kv, dim), "o.weight": (dim, q)}
    shapes |= {"sinks": (sizes["heads"],)} if sizes.get("sinks") else {}
    shapes |= {"q.bias": (q,), "k.bias": (kv,), "v.bias": (kv,)} if sizes.get("qkv_bias") else {}
    shapes |= {"o.bias": (dim,)} if sizes.get("o_bias") else {}
    return shapes | ({f"{name}_norm.weight": (sizes["head_dim"],) for name in "qk"} if sizes.get("qk_norm") else {})


def layer_weights(**sizes: Any) -> Arrays:
    rng = np.random.default_rng(1)
    shapes = projections(LAYER | sizes)
    return {name: (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32) for name, shape in shapes.items()}


def layer_data() -> tuple[np.ndarray, np.ndarray]:
    """Return x and the cotangent of the output, [batch, length, dim] in the natural order of tokens."""
    rng = np.random.default_rng(2)
    x, dout = rng.standard_normal((2, BATCH, LENGTH, LAYER["dim"])).astype(np.float32)
    return x, dout


def transformer_weights(tied: bool = True, **sizes: Any) -> Arrays:
    """Return weights of a size at which no gradient vanishes, norms and sinks included."""
    sizes = TRANSFORMER | sizes
    dim, hidden = sizes["dim"], sizes["hidden"]
    shapes = {"embed.weight": (VOCAB, dim), "norm.weight": (dim,)} | ({} if tied else {"head.weight": (VOCAB, dim)})
    for i in range(sizes["depth"]):
        shapes |= {f"blocks.{i}.attention.{name}": shape for name, shape in projections(sizes).items()}
        shapes |= {f"blocks.{i}.mlp.{name}.weight": (hidden, dim) for name in ("gate", "up")}
        shapes |= {f"blocks.{i}.mlp.down.weight": (dim, hidden)}
        if sizes.get("mlp_bias"):
            shapes |= {f"blocks.{i}.mlp.{name}.bias": (dim if name == "down" else hidden,) for name in ("gate", "up", "down")}
        shapes |= {f"blocks.{i}.{name}.weight": (dim,) for name in ("attention_norm", "mlp_norm")}
    rng = np.random.default_rng(3)
    return {
        name: (rng.standard_normal(shape) * 0.2 + (len(shape) == 1)).astype(np.float32) for name, shape in sorted(shapes.items())
    }


def token_ids(batch: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and labels int32 [batch, length] in natural order; a stretch of labels at the start is ignored."""
    rng = np.random.default_rng(4)
    ids = rng.integers(0, VOCAB, (batch, LENGTH)).astype(np.int32)
    labels = np.concatenate([ids[:, 1:], np.full((batch, 1), -100, np.int32)], 1)
    labels[:, :11] = -100
    return ids, labels


def token_data() -> Arrays:
    """Return ``shard_batch``'s ids and labels: those of ``token_ids``."""
    return dict(zip(("ids", "labels"), token_ids(), strict=True))


def token_pair() -> tuple[np.ndarray, np.ndarray]:
    """Return ids, and ids with another token in the MIDDLE."""
    ids, _ = token_ids()
    other = ids.copy()
    other[:, MIDDLE] = (other[:, MIDDLE] + 1) % VOCAB
    return ids, other


def packed_batch() -> Arrays:
    """Return ``shard_batch``'s arguments [batch, 61]: 3 documents between padding, and 3 of which the first has no keys."""
    rng = np.random.default_rng(6)
    documents = np.repeat([[-1, 0, 1, 2, -1], [0, 1, 2, 2, 2]], [4, 13, 9, 27, 8], axis=1).astype(np.int32)
    ids = rng.integers(0, VOCAB, documents.shape).astype(np.int32)
    key_mask = rng.random(documents.shape) < 0.9
    key_mask[1, documents[1] == 0] = False
    return {"ids": ids, "documents": documents, "key_mask": key_mask}


def rotate(x: np.ndarray, positions: np.ndarray, base: float = 10000.0, sign: int = 1) -> np.ndarray:
    """Return the rotary embedding of x [b s h d] in x's dtype, with angles in float64; ``sign=-1`` rotates back."""
    half = x.shape[-1] // 2
    angles = sign * positions.astype(np.float64)[:, None, None] * base ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1).astype(x.dtype)


def attention_layer(
    weights: Arrays,
    x: np.ndarray,
    dout: np.ndarray,
    mask: Band = causal(),
    rotary_base: float | None = 10000.0,
    alibi: bool = False,
    sinks: bool = False,
    dtype: str | None = None,
    **features: Any,
) -> Arrays:
    """Return out, dx and every weight's gradient of RingAttention: exact in float64, or as one device computes it in ``dtype``.

    With ``segments`` among the features, return those of DilatedRingAttention.
    """
    working = np.float64 if dtype is None else np.dtype(dtype)
    weights, x, dout = {name: w.astype(working) for name, w in weights.items()}, x.astype(working), dout.astype(working)
    where = np.arange(x.shape[1])
    turn = lambda t, sign=1: t if rotary_base is None else rotate(t, where, rotary_base, sign)
    heads = lambda t: t.reshape(*t.shape[:2], -1, LAYER["head_dim"])
    flat = lambda t: t.reshape(*t.shape[:2], -1)
    q, k, v = (heads(x @ weights[f"{name}.weight"].T) for name in "qkv")
    arrays = (turn(q), turn(k), v, heads(dout @ weights["o.weight"]))
    if "segments" in features:
        inner = _dilated(arrays, dilated.DilatedFeatures(mask=mask, **features), dtype)
    else:
        arguments, slopes = (*arrays[:3], mask, arrays[3]), np.array(alibi_slopes(q.shape[2]))
        features |= {"sinks": weights["sinks"] if sinks else None, "alibi_slopes": slopes if alibi else None}
        inner = exact(*arguments, **features) if dtype is None else plain(*arguments, dtype, **features)
    gradients = {"q": flat(turn(inner.dq, -1)), "k": flat(turn(inner.dk, -1)), "v": flat(inner.dv)}
    attended = flat(inner.out)
    result = {"out": attended @ weights["o.weight"].T, "dx": sum(g @ weights[f"{name}.weight"] for name, g in gradients.items())}
    result |= {f"{name}.weight": np.einsum("bsi,bsj->ij", g, x) for name, g in gradients.items()}
    result |= {} if inner.dsinks is None else {"sinks": inner.dsinks}
    return result | {"o.weight": np.einsum("bsi,bsj->ij", dout, attended)}


def _dilated(
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], call: dilated.DilatedFeatures, dtype: str | None
) -> Attention:
    """Return dilated attention of q, k, v and dout, and its gradients."""
    dlse = np.zeros(arrays[0].shape[:3])
    return dilated.exact(*arrays, dlse, call) if dtype is None else dilated.plain(*arrays, dlse, call, dtype)


def check_layer(got: Arrays, weights: Arrays, x: np.ndarray, dout: np.ndarray, **arguments: Any) -> None:
    """Assert that out, dx and every weight's gradient are as near to float64 as a plain float32 computation.

    The gradient of the sinks has few numbers, which the plain computation may hit by chance: the largest bound of all applies.
    """
    truth = attention_layer(weights, x, dout, **arguments)
    reference = attention_layer(weights, x, dout, dtype="float32", **arguments)
    assert got.keys() == truth.keys()
    allowed = {name: bound(reference[name], truth[name], "float32") for name in truth}
    for name, mine in got.items():
        error, most = relative_error(mine, truth[name]), max(allowed.values()) if name == "sinks" else allowed[name]
        assert error <= most, f"{name}: error {error:.3g} against float64, allowed {most:.3g}"


def assert_near(got: Arrays, expected: Arrays, relative: float) -> None:
    """Assert that each array of two results with the same names differs by at most ``relative`` in norm."""
    assert got.keys() == expected.keys()
    for name in expected:
        distance = np.linalg.norm(np.asarray(got[name] - expected[name])) / np.linalg.norm(np.asarray(expected[name]))
        assert distance <= relative, f"{name} differs by {distance:.3g}, allowed {relative:.3g}"


def apart(ours: Arrays, theirs: Arrays) -> float:
    """Return the norm of the difference of a step's gradients, relative to theirs, in the tensor where it is the largest.

    The norm of a gradient that is (nearly) zero counts as a hundredth of the norm of all of them.
    """
    assert ours.keys() == theirs.keys()
    norm = lambda arrays: float(np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in arrays)))
    least = norm(theirs.values()) / 100
    return max(norm([ours[name] - x]) / max(norm([x]), least) for name, x in theirs.items())
