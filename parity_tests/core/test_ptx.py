"""Tests of the changes of PTX before the assembler reads it: descriptors and copied factors of products, and nothing else."""

from __future__ import annotations

import re

import pytest
import triton

from ring_attn_core.kernels import ptx
from ring_attn_core.kernels.ptx import as_before, changed_for_products

HIGH = 4611686293305294848
PRODUCT = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r20,%r21}, %rd2, %rd3, 1, 1, 1, 0, 0;"
OF_39 = f"""
	bfe.u32 	%r1, %r9, 4, 15;
	add.s32 	%r2, %r1, 514;
	cvt.u64.u32 	%rd1, %r2;
	or.b64 	%rd2, %rd1, {HIGH};
	{PRODUCT}
"""
OF_38 = """
	mov.b32 %r5, %r6;
	add.s32 	%r6, %r7, %r8;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r20,%r21}, {%r5,%r5}, %rd3, 1, 1, 1, 0, 0;
"""


def test_a_descriptor_is_one_sum_right_before_its_product():
    lines = as_before(OF_39).splitlines()
    at = lines.index("\t" + PRODUCT)
    assert lines[at - 2 : at] == ["\tcvt.u64.u32 %rd2, %r1;", f"\tadd.s64 %rd2, %rd2, {HIGH + 514};"]
    assert [line for line in lines if line not in lines[at - 2 : at]] == OF_39.splitlines(), "the rest stays"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (", 4, 15;", ", 4, 17;"),
        (f"{HIGH};", f"{HIGH + 2};"),
        (", 514;", ", -514;"),
        (", 514;", f", {2**31};"),
        ("add.s32 	%r2, %r1, 514;", "or.b32 	%r2, %r1, 514;"),
        ("	cvt.u64.u32", "	mov.b32 	%r1, 7;\n	cvt.u64.u32"),
        ("	cvt.u64.u32", "	@%p1 mov.b32 	%r1, 7;\n	cvt.u64.u32"),
        ("	cvt.u64.u32", "	ld.shared.v2.b32 	{%r1, %r30}, [%r31];\n	cvt.u64.u32"),
        ("cvt.u64.u32", "cvt.s64.s32"),
    ],
    ids=[
        "address",
        "high",
        "negative",
        "constant",
        "bits that overlap",
        "twice",
        "twice, under a condition",
        "twice, in a pair",
        "signed",
    ],
)
def test_any_other_sum_is_left_alone(old, new):
    text = OF_39.replace(old, new)
    assert text != OF_39
    assert as_before(text) == text


def test_factors_are_taken_from_where_they_were_copied():
    assert as_before(OF_38).splitlines() == [line.replace("%r5", "%r6") for line in OF_38.splitlines() if "mov" not in line]


@pytest.mark.parametrize(
    "more",
    ["	add.s32 	%r9, %r5, 1;\n", "	mov.b32 	%r6, 0;\n", "	mov.b32 	%r5, 0;\n"],
    ids=["read elsewhere", "source written", "copy"],
)
def test_copies_that_something_else_needs_stay(more):
    assert as_before(OF_38 + more) == OF_38 + more


def test_doing_it_again_changes_nothing():
    assert as_before(as_before(OF_39)) == as_before(OF_39)


def test_triton_is_asked_to_do_so_for_as_long_as_somebody_compiles(monkeypatch):
    """In any thread, and what it was asked before goes on."""
    asked = []
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", lambda *of: asked.append(of) or ("key", "hash"))  # type: ignore
    hook = lambda: triton.knobs.runtime.add_stages_inspection_hook  # type: ignore
    before = hook()
    with changed_for_products((3, 7)):
        assert hook() is before
    with changed_for_products((3, 9)):
        with changed_for_products((3, 9)):
            pass
        key, _ = hook()()
        assert key.startswith("key") and len(key) > 40 and asked == [()]
        stages = {"ptx": lambda source, metadata: OF_39}
        hook()(None, stages, None, None, 100)
        assert re.search(r"add\.s64 %rd2", stages["ptx"]("", {}))
        assert len(asked) == 2
    assert hook() is before
    assert not ptx._threads


def test_a_missing_assembler_gives_none(monkeypatch):
    class Nothing:
        @property
        def ptxas(self):
            raise RuntimeError("Cannot find ptxas")

    assert re.fullmatch(r"\d+\.\d+", ptx.older_assembler() or "")
    monkeypatch.setattr(triton.knobs, "nvidia", Nothing())  # type: ignore
    assert ptx.older_assembler() is None
