"""The two packages say the same: public names, parameters, paths of files, and the text of the loop and of decisions."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import ring_attn_jax as jax_package
import ring_attn_torch as torch_package

ONLY_IN_JAX = {
    "sharded_ring_attention": "PyTorch has no globally sharded arrays outside DTensor",
    "sharded_dilated_attention": "the same",
    "sharded.py": "where these live",
    "variants/sharded_dilated.py": "likewise",
    "sharded_summary_attention": "the same",
    "axes.py": "check_vma and mesh axes",
    "inference/rank_model.py": "weights that are sharded over a mesh; in PyTorch they would be FSDP's",
    "attention_fn": "for flax's modules; torch.nn's MultiheadAttention takes none, so there is another module",
    "layers/adapters.py": "where attention_fn lives",
    "functional/dot_product.py": "the signature of jax.nn",
    "TracedLayout": "in PyTorch other documents compile nothing",
    "call/traced.py": "where TracedLayout lives",
    "training/checkpoint_values.py": "what nnx variables hold; in PyTorch a checkpoint holds tensors, and optimizer states",
    "dilated_attention_fn": "likewise; in PyTorch it is DilatedAttention",
    "layers/dilated_adapter.py": "where dilated_attention_fn lives",
}
ONLY_IN_TORCH = {
    "training/gradients.py": "where sum_gradients lives",
    "sum_gradients": "in JAX shard_map sums the gradients of replicated parameters",
    "training/optimizer_states.py": "in JAX an nnx.Optimizer has a state for every parameter, saved as its variables",
    "tensor_plan": "in JAX head_axis and the weights' shardings say it",
    "layers/tensor_plan.py": "where tensor_plan lives",
    "layers/tensor_styles.py": "what tensor_plan is made of",
    "attend/recent.py": "JAX traces extents, so it cannot tell that they are the same",
    "ring/agreement.py": "JAX is one program, checked when it is traced",
    "check_every_call": "in JAX all ranks run one program, so none can make another call",
    "ring/groups.py": "process groups and device meshes",
    "ring/collectives.py": "the names of collectives in different releases of torch",
    "ring/derivatives.py": "a second derivative raises by itself where JAX has a custom_vjp",
    "ring/peers.py": "memory that GPUs share, which JAX leaves to XLA",
    "ring/peer_access.py": "the GPUs whose memory each rank can copy, and how ranks map it",
    "ring/strategies/push.py": "copies between the memory of GPUs, which JAX leaves to XLA",
    "MultiheadAttention": "the module of torch.nn; flax's modules take an attention_fn",
    "layers/multihead.py": "where MultiheadAttention lives",
    "DilatedAttention": "likewise; in JAX it is dilated_attention_fn",
    "layers/dilated_multihead.py": "where DilatedAttention lives",
    "layers/multihead_base.py": "what these two share",
    "layers/recompute.py": "in JAX a policy of jax.checkpoint",
    "layers/offload.py": "in JAX a policy of jax.checkpoint, and XLA schedules the copies",
    "diffusers.py": "diffusers' models are PyTorch's",
    "torchtitan.py": "torchtitan's models are PyTorch's",
    "transformers/__init__.py": "Hugging Face's models are PyTorch's",
    "transformers/arguments.py": "the same",
    "transformers/attention.py": "the same",
    "transformers/cache.py": "the same",
    "transformers/documents.py": "the same",
    "transformers/loss.py": "the same",
    "transformers/masks.py": "the same",
    "transformers/mixers.py": "the same",
    "transformers/models.py": "the same",
    "transformers/parallel.py": "the same",
    "transformers/shards.py": "the same",
    "transformers/states.py": "the same",
    "transformers/trainer.py": "the same",
    "transformers/trainer_checks.py": "the same",
    "transformers/planned_rows.py": "the same",
    "functional/block_masks.py": "masks of flex_attention, which is PyTorch's",
    "functional/flash.py": "the package flash_attn is PyTorch's",
    "functional/flash_packed.py": "the package flash_attn is PyTorch's",
    "functional/flex.py": "a signature of torch.nn.attention",
    "functional/recurrences.py": "signatures of packages of PyTorch",
    "recurrence/fla.py": "flash-linear-attention is PyTorch's",
    "recurrence/exact.py": "JAX sets the precision of each product",
    "functional/scaled_dot_product.py": "a signature of torch.nn.functional",
    "functional/shards.py": "what these three share",
    "attend/vendor.py": "JAX's attention of cuDNN does not take the lse of a whole ring for its backward",
}
RENAMED = {"group": "axis_name"}
ONLY_JAX_TAKES = {"rngs", "mesh", "batch_axes", "head_axis"}
ONLY_TORCH_TAKES = dict.fromkeys(("check_ranks", "save_weights", "save_llama", "Checkpoints"), "group")
"""In JAX an array's sharding says who should hold the same, or parts of it."""


def test_public_names_are_the_same():
    assert set(jax_package.__all__) - set(ONLY_IN_JAX) == set(torch_package.__all__) - set(ONLY_IN_TORCH)
    assert all(hasattr(jax_package, name) for name in jax_package.__all__)


@pytest.mark.parametrize("package", [jax_package, torch_package], ids=["jax", "torch"])
def test_import_star_leaves_the_shard_of_dtensor_alone(package):
    from torch.distributed.tensor import Shard

    names = {"Shard": Shard}
    exec(f"from {package.__name__} import *", names)
    assert names["Shard"] is Shard
    assert package.Shard is type(package.shard_batch([[1, 2]], "zigzag", 1))


def test_files_are_the_same():
    files = lambda package: {
        str(path.relative_to(Path(package.__file__).parent)) for path in Path(package.__file__).parent.rglob("*.py")
    }
    assert files(jax_package) - set(ONLY_IN_JAX) == files(torch_package) - set(ONLY_IN_TORCH)


def test_every_exception_is_one():
    for ours, theirs, names in ((jax_package, torch_package, ONLY_IN_JAX), (torch_package, jax_package, ONLY_IN_TORCH)):
        for name in names:
            folder = Path(theirs.__file__).parent  # type: ignore
            assert not hasattr(theirs, name) if not name.endswith(".py") else not (folder / name).exists()
            assert hasattr(ours, name) if not name.endswith(".py") else (Path(ours.__file__).parent / name).exists()  # type: ignore


@pytest.mark.parametrize("name", sorted(set(jax_package.__all__) & set(torch_package.__all__)))
def test_parameters_have_the_same_names_order_and_defaults(name):
    ours, theirs = getattr(jax_package, name), getattr(torch_package, name)
    left_out = RENAMED.get(ONLY_TORCH_TAKES.get(name, ""))
    without = lambda function: [each for each in parameters(function) if each[0] != left_out]
    if inspect.isclass(ours):
        assert parameters(ours.__init__) == without(theirs.__init__)
        if hasattr(theirs, "forward"):
            assert parameters(ours.__call__) == parameters(theirs.forward)
    elif callable(ours):
        assert parameters(ours) == without(theirs)


def parameters(function) -> list[tuple[str, object, str]]:
    found = []
    for parameter in inspect.signature(function).parameters.values():
        name = RENAMED.get(parameter.name, parameter.name)
        if name not in ONLY_JAX_TAKES:
            default = None if name == "axis_name" else parameter.default
            found.append((name, default, str(parameter.kind)))
    return found


def test_the_loop_is_the_same_text():
    ours, theirs = ((Path(p.__file__).parent / "ring" / "loop.py").read_text() for p in (jax_package, torch_package))  # type: ignore
    assert renamed(ours) == renamed(theirs)


def renamed(text: str) -> str:
    return text[text.index("def forward") :].replace("jax.Array", "Tensor")


def test_decisions_and_their_compilation_are_the_same_text():
    """Except for the name of a ring, the traced positions of JAX, and the cache of PyTorch, which decides at every call."""
    ours, theirs = ((Path(p.__file__).parent / "call" / "decide.py").read_text() for p in (jax_package, torch_package))  # type: ignore
    ours = ours.replace("axis_name: str", "group: Group").replace("axis_name", "group").replace(", arrays.positions)", ")")
    theirs = theirs.replace("@lru_cache(maxsize=MAX_KNOWN)\n", "")
    shared = lambda text: text[text.index("class Decision") : text.index("def _backend")]
    assert shared(ours) == shared(theirs)


@pytest.mark.parametrize("package", [jax_package, torch_package], ids=["jax", "torch"])
def test_an_invalid_rank_is_refused(package):
    with pytest.raises(ValueError, match="rank=-1 is not one of 2 ranks"):
        package.positions("zigzag", 2, 9, -1)
