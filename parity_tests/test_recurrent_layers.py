"""GatedDeltaNet and Mamba2 on a ring are those of one device, in both packages and of transformers; hybrid models of them."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import ring_attn_torch
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.lora import LoRA
from ring_attn_core.model.memory import Training, peak_memory

from .support.recurrences import DOCUMENTS, LENGTH, relative
from .support.recurrent_layers import DIM, HEADS, LAYERS, SIZES, like, reference, tokens
from .support.selection import first
from .test_recurrence import IDS, in_place

PLACES = [("zigzag", True), ("balanced", True), ("contiguous", True), ("zigzag", False)]
"""Layouts, and whether the rows are packed documents."""
EXTENTS = ring_attn_torch.document_extents(IDS)
HYBRID: dict[str, Any] = {
    "vocab": 31,
    "dim": 16,
    "depth": 4,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 24,
    "mixers": ("gated_delta_net", "mamba2", "gated_delta_net", "attention"),
}


def begins(documents: bool) -> torch.Tensor:
    return EXTENTS[..., 0].long() if documents else torch.zeros_like(IDS)


def shard_of(x: torch.Tensor, layout: Any, ranks: int, rank: int) -> torch.Tensor:
    return ring_attn_torch.to_layout(x, layout, ranks).chunk(ranks, 1)[rank]


def layer_on_rank(group: Any, name: str, layout: str, documents: bool) -> dict[str, float]:
    """Return the relative errors of this rank's output and gradients; those of weights are summed over the ranks."""
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    where, made, of_batch = in_place(layout, ranks)
    shard = lambda x: shard_of(x, where, ranks, rank)
    layer = getattr(ring_attn_torch, name)(DIM, HEADS, **SIZES[name], layout=made, group=group, param_dtype="float64")
    weights = like({key: x.shape for key, x in ring_attn_torch.to_numpy(layer).items()})
    ring_attn_torch.from_numpy(layer, weights)
    x = shard(tokens(1)).requires_grad_()
    out = layer(x, length=LENGTH, extents=shard(EXTENTS) if documents else None, **of_batch)
    out = out * shard(torch.ones(2, LENGTH, 1))  # padding gives a bias
    (out * shard(tokens(2))).sum().backward()
    if ranks > 1:
        ring_attn_torch.sum_gradients(layer, group=group)
    expected = reference(name, weights, begins(documents))
    errors = {key: relative(p.grad, expected[key]) for key, p in layer.named_parameters()}
    for key, y in (("out", out.detach()), ("x", x.grad)):
        errors[key] = relative(y, shard(torch.from_numpy(expected[key])).numpy())
    assert errors.keys() == expected.keys()
    return errors


@pytest.mark.parametrize("ranks", first([3, 1, 2, 4, 8]))
@pytest.mark.parametrize(("layout", "documents"), first(PLACES, 2))
@pytest.mark.parametrize("name", LAYERS)
def test_a_recurrent_layer_of_pytorch_is_one_device(gloo, name, layout, documents, ranks):
    for errors in gloo(ranks, layer_on_rank, name, layout, documents):
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.slow
@pytest.mark.parametrize("ranks", first([4, 1, 2, 3, 8]))
@pytest.mark.parametrize(("layout", "documents"), first(PLACES[::-1][1:] + PLACES[-1:]))
@pytest.mark.parametrize(
    ("name", "inside"), first([("GatedDeltaNet", False), ("Mamba2", True), ("GatedDeltaNet", True), ("Mamba2", False)], 2)
)
def test_a_recurrent_layer_of_jax_is_one_device(name, inside, layout, documents, ranks):
    jax = pytest.importorskip("jax")
    nnx = pytest.importorskip("flax.nnx")
    import ring_attn_jax

    from .jax.ring import QUICK, mesh_of

    with jax.enable_x64(True):
        (where, made, of_batch), mesh = in_place(layout, ranks), mesh_of(ranks)
        arguments = SIZES[name] | ({} if inside else {"mesh": mesh}) | {"layout": made, "param_dtype": "float64"}
        layer = getattr(ring_attn_jax, name)(DIM, HEADS, **arguments, rngs=nnx.Rngs(0))
        weights = like({key: x.shape for key, x in ring_attn_jax.to_numpy(layer).items()})
        ring_attn_jax.from_numpy(layer, weights)
        whole = lambda x: ring_attn_jax.to_layout(jax.numpy.asarray(x.numpy()), where, ranks)
        graph, state = nnx.split(layer)
        over, extents = jax.P(None, "seq"), [whole(EXTENTS)] if documents else []
        call = lambda state, x, *extents: nnx.merge(graph, state)(x, LENGTH, extents=extents[0] if extents else None, **of_batch)
        if inside:
            call = jax.shard_map(call, mesh=mesh, in_specs=(jax.P(), over, *[over] * len(extents)), out_specs=over)

        def results(state: Any, x: Any, cotangent: Any) -> Any:
            out, backward = jax.vjp(lambda state, x: call(state, x, *extents), state, x)
            return out, *backward(cotangent)

        out, dstate, dx = jax.jit(results, compiler_options=QUICK)(state, whole(tokens(1)), whole(tokens(2)))
        found = ring_attn_jax.to_numpy(nnx.merge(graph, dstate)) | {
            key: np.asarray(ring_attn_jax.from_layout(y, where, ranks, LENGTH)) for key, y in (("out", out), ("x", dx))
        }
        expected = reference(name, weights, begins(documents))
        assert found.keys() == expected.keys()
        errors = {key: relative(found[key], expected[key]) for key in expected}
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("name", LAYERS)
def test_a_recurrent_layer_is_that_of_transformers(name):
    pytest.importorskip("transformers")
    shared: dict[str, Any] = {"hidden_size": DIM, "num_hidden_layers": 2}
    torch.manual_seed(0)
    if name == "GatedDeltaNet":
        module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
        sizes = {"num_value_heads": HEADS, "num_key_heads": 2, "key_head_dim": 6, "value_head_dim": 5}
        config = module.Qwen3NextConfig(**shared, **{f"linear_{key}": n for key, n in sizes.items()}, num_attention_heads=2)
        theirs = module.Qwen3NextGatedDeltaNet(config, 0)
    else:
        module = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
        sizes = {"num_heads": HEADS, "head_dim": 6, "state_size": 5, "n_groups": 2, "expand": 2, "use_bias": True}
        if "group_size" not in inspect.signature(module.MambaRMSNormGated).parameters:
            pytest.skip("the norm of this release of transformers ignores groups")
        theirs = module.Mamba2Mixer(module.Mamba2Config(**shared, **sizes, chunk_size=16), 0)
    ours = getattr(ring_attn_torch, name)(DIM, HEADS, **SIZES[name], layout="contiguous")
    weights = like({key: tuple(x.shape) for key, x in theirs.state_dict().items()}, np.float32)
    ring_attn_torch.from_numpy(ours, weights)
    ring_attn_torch.from_numpy(theirs, weights)
    x, cotangent = tokens(1).float(), tokens(2).float()
    results = []
    for layer in (ours, theirs.eval()):
        out = layer(x)
        gradients = torch.autograd.grad(
            (out * cotangent).sum(), list(ours.parameters() if layer is ours else theirs.parameters())
        )
        names = [key for key, _ in layer.named_parameters()]
        results.append({"out": out.detach()} | dict(zip(names, gradients, strict=True)))
    assert results[0].keys() == results[1].keys()
    for key, expected in results[1].items():
        assert relative(results[0][key], expected.numpy()) < 1e-5, key


def hybrid(**options: Any) -> ring_attn_torch.RingTransformer:
    """Return the hybrid model with slow decays, on a ring of PyTorch."""
    model = ring_attn_torch.RingTransformer(**HYBRID, param_dtype="float64", **options)
    weights = like({key: x.shape for key, x in ring_attn_torch.to_numpy(model).items()})
    return ring_attn_torch.from_numpy(model, weights)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [2, LENGTH] and the logits' cotangent, in the natural order of tokens."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, HYBRID["vocab"], (2, LENGTH), generator=generator)
    return ids, torch.randn(2, LENGTH, HYBRID["vocab"], generator=generator, dtype=torch.float64)


def documents_alone() -> dict[str, np.ndarray]:
    """Return the logits, and the gradients by name, of the hybrid model on one device, each document on its own."""
    model, (ids, cotangent), logits = hybrid(layout="contiguous"), batch(), []
    for row, lengths in enumerate(DOCUMENTS):
        for one, weight in zip(ids[row].split(lengths), cotangent[row].split(lengths), strict=True):
            logits.append(model(one[None])[0])
            (logits[-1] * weight).sum().backward()
    together = torch.cat([x.detach() for x in logits]).unflatten(0, (2, -1))
    return {"logits": together.numpy()} | {key: np.asarray(p.grad) for key, p in model.named_parameters()}


def hybrid_on_rank(group: Any, layout: str, activations: str) -> dict[str, np.ndarray]:
    """Return the whole logits of packed documents, and the gradients summed over the ranks."""
    shard = lambda x: shard_of(x, layout, group.size(), group.rank())
    model, (ids, cotangent) = hybrid(layout=layout, group=group, activations=activations), batch()
    out = model(shard(ids), length=LENGTH, extents=shard(EXTENTS))
    (out * shard(cotangent)).sum().backward()
    ring_attn_torch.sum_gradients(model, group=group)
    logits = ring_attn_torch.gather(out.detach(), group=group, layout=layout, length=LENGTH)
    return {"logits": logits.numpy()} | {key: np.asarray(p.grad) for key, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "layout", "activations"),
    first([(3, "zigzag", "keep"), (2, "contiguous", "recompute"), (2, "zigzag", "offload")], 2),
)
def test_a_hybrid_model_with_packed_documents_computes_each_document_alone(gloo, ranks, layout, activations):
    expected = documents_alone()
    for found in gloo(ranks, hybrid_on_rank, layout, activations):
        assert found.keys() == expected.keys()
        for key in expected:
            assert relative(found[key], expected[key]) < 1e-11, key


@pytest.mark.parametrize("gradients", first([False, True]), ids=["logits", "gradients"])
def test_a_saved_hybrid_model_is_the_same_in_both_frameworks(tmp_path, gradients):
    jax = pytest.importorskip("jax")
    nnx = pytest.importorskip("flax.nnx")
    import ring_attn_jax

    from .jax.ring import QUICK, mesh_of

    ring_attn_torch.save_weights(hybrid(layout="contiguous"), tmp_path / "hybrid")
    expected = documents_alone()
    with jax.enable_x64(True):
        model = ring_attn_jax.load_weights(tmp_path / "hybrid", mesh=mesh_of(2), activations="recompute" if gradients else "keep")
        assert model.config == hybrid().config
        graph, state = nnx.split(model)
        ids, cotangent, extents = (
            ring_attn_jax.to_layout(jax.numpy.asarray(x.numpy()), "zigzag", 2) for x in (*batch(), EXTENTS)
        )
        call = lambda state: nnx.merge(graph, state)(ids, length=LENGTH, extents=extents)

        def results(state: Any) -> Any:
            out, backward = jax.vjp(call, state)
            return out, backward(cotangent)[0] if gradients else state

        out, dstate = jax.jit(results, compiler_options=QUICK)(state)
        found = {"logits": np.asarray(ring_attn_jax.from_layout(out, "zigzag", 2, LENGTH))}
        found |= ring_attn_jax.to_numpy(nnx.merge(graph, dstate)) if gradients else {}
        for key in found:
            assert relative(found[key], expected[key]) < 1e-11, key


@pytest.mark.parametrize(
    ("options", "call", "words"),
    [
        ({"layout": "striped"}, {}, "a recurrence needs runs of consecutive tokens"),
        ({}, {"key_extents": torch.zeros(1, 4, 2, dtype=torch.int32)}, "key_extents is a mask of attention"),
        ({}, {"key_mask": torch.ones(1, 4, dtype=torch.bool)}, "key_mask is a mask of attention"),
        ({"auto_shard": True}, {"mask": torch.ones(1, 4, dtype=torch.bool)}, "mask is a mask of attention"),
    ],
    ids=["striped", "key_extents", "key_mask", "mask"],
)
def test_unsupported_options_of_a_hybrid_model_are_the_same_error_on_every_rank(gloo, options, call, words):
    gloo.refuse(words, 2, called_with, options, call)


def called_with(group: Any, options: dict[str, Any], call: dict[str, Any]) -> None:
    model = ring_attn_torch.RingTransformer(**HYBRID, group=group, **options)
    model(torch.zeros(1, 4, dtype=torch.long), **call)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model, folder: ring_attn_torch.tensor_plan(model), "tensor_plan splits the heads of attention, and layer 0"),
        (lambda model, folder: ring_attn_torch.save_llama(model, folder), "Qwen3 computes mixers"),
        (lambda model, folder: LoRA().check(model.config), "adapters of attention's projections are in every layer"),
        (lambda model, folder: peak_memory(model.config, Training(gpus=1, tokens=8)), "memory is computed of attention layers"),
    ],
    ids=["tensor_plan", "save_llama", "LoRA", "peak_memory"],
)
def test_missing_features_of_a_hybrid_model_are_refused_by_name(tmp_path, call, words):
    with pytest.raises(ValueError, match=words):
        call(ring_attn_torch.RingTransformer(**HYBRID, tied=False), tmp_path / "saved")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixers": ["attention"] * 3}, "mixers must be a list with one of attention, gated_delta_net, mamba2"),
        ({"mixers": ["mamba"] * 4}, "'mamba', 'mamba'"),
        ({"mixers": "mamba2"}, "got 'mamba2'"),
        ({"windows": (3, None, None, 3)}, r"windows\[0\] must be None: layer 0 is gated_delta_net"),
        ({"rotaries": (None, 1e4, None, 1e4)}, r"rotaries\[1\] must be None: layer 1 is mamba2"),
        ({"mask": ring_attn_torch.full()}, "layer 0 is gated_delta_net, which sees all earlier tokens"),
        ({"mask": ring_attn_torch.sliding_window(8)}, r"mask=causal\(\), and windows=\[...\] for attention layers"),
        ({"mask": ring_attn_torch.causal(-1)}, "layer 0 is gated_delta_net"),
    ],
)
def test_mixers_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        TransformerConfig(**HYBRID | options)


def test_mixers_that_are_all_attention_are_a_model_without_mixers():
    assert TransformerConfig(**HYBRID | {"mixers": ["attention"] * 4}) == TransformerConfig(**HYBRID | {"mixers": None})  # type: ignore


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("GatedDeltaNet", {"key_heads": 3}, "key_heads=3 must divide heads=4"),
        ("Mamba2", {"groups": 3}, "groups=3 must divide heads=4"),
        ("Mamba2", {"taps": 0}, "taps must be an int of at least 1"),
    ],
)
def test_sizes_of_a_recurrent_layer_that_do_not_fit_are_refused(name, arguments, words):
    with pytest.raises(ValueError, match=words):
        getattr(ring_attn_torch, name)(DIM, HEADS, **arguments)
