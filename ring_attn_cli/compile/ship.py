"""Compile the kernels that a wheel ships into ``ring_attn_core/kernels/shipped``, without line numbers, 3/4 of a binary.

    TRITON_DISABLE_LINE_INFO=1 python -m ring_attn_cli.compile.ship

The plain cases in bfloat16 on Hopper GPUs: heads of 64, 128, 256 and 192 with values of 128, with and without extents, on one GPU
and on rings of any size in the zigzag and balanced layouts.
"""

from __future__ import annotations

from shutil import rmtree
from tempfile import TemporaryDirectory

from ring_attn_core.kernels import shipped
from ring_attn_core.kernels.compile import compile_here, sources, start
from ring_attn_core.kernels.launch import Launch, Specialization

from . import ModelAttention, kernels_of, problems

WIDTHS = (64, 64), (128, 128), (256, 256), (192, 128)
RINGS = (1, "contiguous", "auto"), *((ranks, layout, name) for ranks in (2, 4) for layout, name in (
    ("zigzag", "ring"), ("zigzag", "gather"), ("balanced", "ring"), ("balanced", "direct"),
))  # fmt: skip
"""Ranks, layouts and strategies. A ring of 4 has the kernels of larger ones, and "push" those of the ring."""
CAPABILITY = 90
GPU = f"sm_{CAPABILITY}"


def plain_cases(widths: tuple[tuple[int, int], ...] = WIDTHS) -> dict[Specialization, Launch]:
    needed = {}
    for head_dim, v_dim in widths:
        for arrays in (frozenset[str](), frozenset({"extents"})):
            attention = ModelAttention(head_dim=head_dim, v_dim=v_dim, arrays=arrays)
            for ranks, layout, strategy in RINGS:
                for launch in kernels_of(problems(attention, GPU, ranks, layout, strategy)):
                    needed[launch.specialization(CAPABILITY)] = launch
    return needed


def main(widths: tuple[tuple[int, int], ...] = WIDTHS) -> None:
    from triton import knobs

    rmtree(shipped.FOLDER, ignore_errors=True)
    needed = plain_cases(widths)
    with TemporaryDirectory() as folder:
        knobs.cache.dir = folder
        for worker in start(needed.values(), CAPABILITY):
            worker.wait()
        size = sum(shipped.save(spec, sources(), compile_here(spec)) for spec in needed)
    print(f"{len(needed)} kernels, {size / 2**20:.1f} MiB in {shipped.FOLDER}")


if __name__ == "__main__":
    main()
