"""The command ``ring-attn compile`` and its options."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..error_reporting import errors_in_one_line


def compile_kernels(
    model: Annotated[
        str | None,
        typer.Argument(help="A name such as qwen3-8b, a config.json, or a TOML of ring-attn train.", show_default=False),
    ] = None,
    gpu: Annotated[str, typer.Option(help="Architecture of the GPU to compile for; this host needs none.")] = "sm_90",
    ranks: Annotated[int, typer.Option(help="Number of ranks of a ring; more than 4 need the kernels of 4.")] = 1,
    layout: Annotated[str | None, typer.Option(help="Layout of the ring.", show_default="zigzag")] = None,
    strategy: Annotated[str, typer.Option(help="Strategy of the ring.")] = "auto",
    heads: Annotated[str | None, typer.Option(help="Query heads/key heads.", show_default="the model's, or 32/8")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head.", show_default="the model's, or 128")] = None,
    v_dim: Annotated[int | None, typer.Option(help="Size of a head of v.", show_default="head_dim")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of q, k, v.", show_default="the model's, or bfloat16")] = None,
    features: Annotated[
        str,
        typer.Option(help="More features: extents (documents), key_extents, key_mask, sinks, alibi_slopes, dropout, softcap."),
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="Compile nothing; exit with status 1 if a kernel is missing.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Compile the kernels of a model's attention into Triton's cache, so that its first call compiles nothing.

    The cache, ~/.triton/cache or TRITON_CACHE_DIR, serves every machine with the same releases of ring-attn and Triton.
    """
    with errors_in_one_line():
        from rich.progress import Progress

        from ring_attn_core.kernels.compile import is_cached

        from . import ModelAttention, attention_of, compile_all, kernels_of, problems, with_features

        attention = ModelAttention() if model is None else attention_of(model)
        if heads is not None:
            q_heads, _, k_heads = heads.partition("/")
            if not q_heads.isdecimal() or not (k_heads or q_heads).isdecimal():
                raise ValueError(f"--heads takes numbers of query and key heads such as 32/8, got {heads!r}")
            attention = replace(attention, heads=int(q_heads), kv_heads=int(k_heads or q_heads))
        if head_dim is not None:
            attention = replace(attention, head_dim=head_dim, v_dim=head_dim)
        attention = replace(attention, v_dim=v_dim or attention.v_dim, dtype=dtype or attention.dtype)
        attention = with_features(attention, features)
        found = list(problems(attention, gpu, ranks, layout or "zigzag", strategy))
        launches, capability = kernels_of(found), found[0].capability
        console = Console(width=shutil.get_terminal_size().columns, highlight=False, markup=False)
        if check:
            missing = [launch.kernel for launch in launches if not is_cached(launch, capability)]
            console.print(f"{len(launches) - len(missing)} of {len(launches)} kernels are compiled")
            raise typer.Exit(1 if missing else 0)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(f"compiling for {gpu}", total=len(launches))
            report = compile_all(launches, capability, lambda: progress.advance(task))
        console.print(str(report))
        if json_file is not None:
            json_file.write_text(json.dumps(report._asdict(), indent=2) + "\n", "utf-8")
