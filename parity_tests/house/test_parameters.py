"""No private function takes more than seven arguments, or hides them in one that has no type: a record is missing then."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 7
PUBLIC = {
    "ring_attention",
    "loss",
    "attend_block",
    "tree_attention_decode",
    "causal_conv",
    "gated_delta_rule",
    "state_space",
    "sharded_ring_attention",
    "dilated_attention",
    "sharded_dilated_attention",
    "summary_attention",
    "sharded_summary_attention",
    "shard_batch",
    "ring_backend",
    "RingAttention.__call__",
    "RingAttention.forward",
    "RingTransformer.__call__",
    "RingTransformer.forward",
    "FolderDataset.__init__",
    "MultiheadAttention.forward",
    "attention_fn",
    "FlaxFunction.__call__",
    "DilatedAttention.forward",
    "dilated_attention_fn",
    "KVCache.make",
    "RingTransformer.generate",
    "prefill",
    "ring_attention_forward",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "scaled_dot_product_attention",
    "flex_attention",
    "dot_product_attention",
    "causal_conv1d_fn",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "mamba_chunk_scan_combined",
    "selective_scan_fn",
    "plan",
    "compare",
    "demo",
    "generate",
    "doctor",
    "compile_kernels",
}
"""The functions that users call with keywords; each hands records on."""

FORWARDED = {
    "sharded_ring_attention": "ring_attention's own keywords",
    "load_weights": "what RingTransformer.from_config takes besides the config",
    "load_llama": "the same",
    "Block.forward": "the keywords of RingAttention's call",
    "Block.__call__": "the same",
    "build_model": "the ring's, for either package",
    "_zeros": "what RingTransformer.from_config takes besides the config",
    "save_model": "the same",
    "ring_attention_forward": "what a layer of transformers hands to its attention; unknown names are refused",
    "ring_mask": "what transformers hands to whoever makes a mask",
    "_run_structured": "what a mixer of transformers hands to its scan",
    "_selective": "the same",
    "RingCache.update": "what transformers hands to a cache",
    "RingTraining.__init__": "the Trainer's that comes after it",
    "RingTraining.train": "the same",
    "RingTraining.evaluation_loop": "the same",
    "RingTraining.__init_subclass__": "those of a class statement",
    "RingDocuments.__init_subclass__": "the same",
    "RingTraining.compute_loss": "the same",
    "exact": "the fields of Features",
    "plain": "the fields of Features",
    "CacheSpec.of": "the fields of CacheSpec",
    "Generation.of": "what RingTransformer.generate was given",
    "the_call": "the fields of RingCall",
    "run": "the fields of compare's Case",
    "find_leaks": "the fields of compare's Case",
    "make_sweep": "the fields of compare's Case",
    "Evidence.attend": "the arguments of exact",
    "RingInnerAttention.forward": "those of torchtitan's other inner attentions",
    "flash_attn_qkvpacked_func": "the arguments of flash_attn_func",
    "flash_attn_kvpacked_func": "the arguments of flash_attn_func",
    "flash_attn_varlen_qkvpacked_func": "the arguments of flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func": "the arguments of flash_attn_varlen_func",
    "_add_stage": "what Triton hands to its hook",
}
"""The functions that take ``*arguments`` or ``**keywords`` of any kind, and the owner of these."""

FILES = [
    path
    for package in ("ring_attn_core", "ring_attn_jax", "ring_attn_torch", "ring_attn_cli", "benchmarks")
    for path in sorted((ROOT / package).rglob("*.py"))
    if not {"portable", "hopper"} & set(path.parts)
]
"""Kernels are left out: what they take is data for the GPU, grouped in named tuples."""


@cache
def functions(path: Path) -> tuple[tuple[str, ast.FunctionDef], ...]:
    """The functions of a file, methods as Class.method."""

    def within(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield prefix + child.name, child
            yield from within(child, f"{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    return tuple(within(ast.parse(path.read_text()), ""))


def mistakes(name: str, function: ast.FunctionDef) -> Iterator[str]:
    a = function.args
    taken = [x for x in (*a.posonlyargs, *a.args, *a.kwonlyargs) if x.arg not in ("self", "cls")]
    if len(taken) > MOST and name not in PUBLIC:
        yield f"{name} takes {len(taken)} arguments"
    typed = lambda x: x.annotation is not None and ast.unparse(x.annotation) != "Any"
    if a.kwarg is not None and name not in FORWARDED and not typed(a.kwarg):
        yield f"{name} takes **{a.kwarg.arg} of any kind"
    if a.vararg is not None and a.vararg.arg != "_" and name not in FORWARDED and not typed(a.vararg):
        yield f"{name} takes *{a.vararg.arg} of any kind"
    for x in taken:
        if x.annotation is not None and ast.unparse(x.annotation) in ("tuple", "dict", "list"):
            yield f"{name} takes {x.arg}, a {ast.unparse(x.annotation)} of anything"


def test_arguments_are_few_and_have_types():
    found = {path: [mistake for name, function in functions(path) for mistake in mistakes(name, function)] for path in FILES}
    assert {str(path.relative_to(ROOT)): made for path, made in found.items() if made} == {}


@pytest.mark.parametrize(
    "text",
    [
        "def f(a, b, c, d, e, f, g, h): ...",
        "class A:\n    def f(self, *, a, b, c, d, e, f, g, h): ...",
        "def f(**options): ...",
        "def f(*arguments: Any): ...",
        "def f(state: dict): ...",
    ],
)
def test_the_test_finds_what_it_looks_for(tmp_path: Path, text: str):
    file = tmp_path / "file.py"
    file.write_text(text)
    assert len([mistake for name, function in functions(file) for mistake in mistakes(name, function)]) == 1


def test_every_exception_is_one():
    names = {name for path in FILES for name, _ in functions(path)}
    assert names >= PUBLIC | set(FORWARDED)
