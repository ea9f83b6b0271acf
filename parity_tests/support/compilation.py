"""The call that most kernels are compiled for, and measures of their binaries, without a GPU."""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from contextlib import redirect_stdout
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import triton

from ring_attn_core.kernels.call import RingCall
from ring_attn_core.kernels.compile import compile_launch
from ring_attn_core.kernels.launch import Launch

PLAIN = RingCall(
    batch=1,
    seq_local=16384,
    kv_local=16384,
    heads=16,
    kv_heads=16,
    head_dim=128,
    v_dim=128,
    q_runs=1,
    k_runs=1,
    dtype="bfloat16",
    scale=128**-0.5,
    softcap=None,
    dropout_rate=0.0,
    array_names=frozenset(),
    packed=False,
    aligned=True,
    zero_masked=False,
    fully_masked=False,
    tf32=False,
    capability=90,
)
EVERYTHING = frozenset({"extents", "key_mask", "sinks", "alibi_slopes", "dropout_seed"})


def resources(kernel) -> tuple[int, int, int]:
    """Return three counts of a binary: bytes of stack, reloads of spilled registers in the loop without a mask, wgmma."""
    used = cuobjdump(kernel, "-res-usage")
    reloads = sum("LDL" in instruction for instruction in step(kernel))
    return int(re.search(r"STACK:(\d+)", used)[1]), reloads, sass(kernel).count("HGMMA")  # type: ignore[index]


def step(kernel) -> list[str]:
    """Return the instructions of the shortest loop with a matrix product, which is the loop over tiles without a mask."""
    instructions = [(int(m[1], 16), m[2]) for m in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass(kernel))]
    loops = []
    for at, text in instructions:
        jump = re.search(r"BRA.*0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < at:
            body = [other for place, other in instructions if int(jump[1], 16) <= place <= at]
            loops.append(body) if any("HGMMA" in other for other in body) else None
    return min(loops, key=len)


_advice: dict[bytes, str] = {}
"""The messages of ptxas about the binaries that this process has compiled."""


def compiled_with_advice(launch: Launch) -> Any:
    """Compile a launch for sm_90 and keep the messages of ptxas: on wide heads it takes as long as the rest of the compiler."""
    said = io.StringIO()
    with triton.knobs.nvidia.scope(), redirect_stdout(said):  # type: ignore
        triton.knobs.nvidia.dump_ptxas_log = True  # type: ignore
        kernel = compile_launch(launch, 90)
    if "registers" in said.getvalue():
        _advice[kernel.asm["cubin"]] = said.getvalue()
    return kernel


def advice(kernel) -> str:
    """Return the messages of ptxas about a kernel. Run ptxas if the binary came from Triton's cache."""
    if kernel.asm["cubin"] in _advice:
        return _advice[kernel.asm["cubin"]]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx, tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        ptx.write(kernel.asm["ptx"])
        ptx.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", ptx.name, "-o", binary.name]  # type: ignore
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "registers" in said
    return said


def released_in_flight(kernel) -> list[str]:
    """Return the loads from shared memory that are still unused when a thread releases the buffer by bar.arrive.

    Follow every path through the binary: around its loops, and to either side of its branches.
    """
    code = {int(at, 16): text.strip() for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass(kernel))}
    following = dict(pairwise(sorted(code)))
    pending: dict[int, frozenset[tuple[int, str]]] = {}
    found: set[tuple[int, str]] = set()
    for begin in sorted(code):  # code not reached yet is the target of a jump table
        ways = [] if begin in pending else [(begin, frozenset())]
        while ways:
            at, loads = ways.pop()
            if at in pending and loads <= pending[at]:
                continue
            loads = pending[at] = pending.get(at, frozenset()) | loads
            condition, name, operands = re.fullmatch(r"(@!?U?P\w+ )?(\S+) ?(.*)", code[at]).groups()  # type: ignore[union-attr]
            if name.startswith("BAR.ARV"):
                found |= loads
                loads = frozenset()
            used = {int(n) for n in re.findall(r"\bR(\d+)", operands)}
            loads = frozenset((first, text) for first, text in loads if not used & set(range(first, first + 4)))
            if name.startswith("LDS"):  # and LDSM
                loads |= {(int(re.search(r"R(\d+)", operands)[1]), code[at])}  # type: ignore[index]
            target = re.search(r"(?:^|, )0x([0-9a-f]+)$", operands) if name.startswith(("BRA", "BSSY")) else None
            if target:
                ways.append((int(target[1], 16), loads))
            leaves = condition is None and (name in ("EXIT", "RET", "BRX") or (name == "BRA" and operands.startswith("0x")))
            if at in following and not leaves:
                ways.append((following[at], loads))
    return sorted(text for _, text in found)


def sass(kernel) -> str:
    """Return the disassembly of a kernel."""
    return cuobjdump(kernel, "-sass")


def cuobjdump(kernel, option: str) -> str:
    return _dumped(kernel.asm["cubin"], option)


@cache
def _dumped(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(cubin)
        binary.flush()
        return subprocess.run([tool, option, binary.name], capture_output=True, text=True, check=True).stdout
