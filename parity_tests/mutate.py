"""Breaks the library on purpose, one line at a time: each break must turn the test that is named for it red.

    python -P parity_tests/mutate.py [name ...]

Every break is made in a copy of the checkout, and the run stops at the first break that no test notices.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH = "parity_tests/torch/test_ring.py::test_out_lse_and_gradients_are_exact[layout=zigzag]"
JAX = "parity_tests/jax/test_ring.py::test_out_lse_and_gradients_are_exact[layout=zigzag]"
TORCH_FEATURES = "parity_tests/torch/test_ring.py::test_every_feature_at_once_is_exact[zigzag]"
JAX_FEATURES = "parity_tests/jax/test_ring.py::test_every_feature_at_once_is_exact[zigzag]"


@dataclass(frozen=True)
class Break:
    """Replace ``old``, which stands once in ``file``, by ``new``: ``test`` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


BREAKS = [
    Break(
        "torch: dk and dv swapped",
        "ring_attn_torch/op.py",
        "    dk, dv = gradients_apart(dkv, k, v)",
        "    dv, dk = gradients_apart(dkv, k, v)",
        TORCH,
    ),
    Break(
        "jax: dk and dv swapped",
        "ring_attn_jax/op.py",
        "dk.astype(inputs.k.dtype), dv.astype(inputs.v.dtype)",
        "dv.astype(inputs.k.dtype), dk.astype(inputs.v.dtype)",
        JAX,
    ),
    Break(
        "torch: another rank's gradient dropped",
        "ring_attn_torch/attend/blockwise.py",
        "dkv.add_(before)",
        "dkv.copy_(before)",
        TORCH,
    ),
    Break(
        "jax: another rank's gradient dropped",
        "ring_attn_jax/attend/blockwise.py",
        "before + dkv",
        "before",
        JAX,
    ),
    Break(
        "torch: a zero gradient",
        "ring_attn_torch/op.py",
        "return dq if dq.dtype == q.dtype else dq.to(q.dtype), dk",
        "return torch.zeros_like(q), dk",
        TORCH,
    ),
    Break(
        "jax: a zero gradient",
        "ring_attn_jax/op.py",
        "return dq.astype(inputs.q.dtype), dk",
        "return jnp.zeros_like(inputs.q), dk",
        JAX,
    ),
    Break(
        "torch: lse off by log 2",
        "ring_attn_torch/attend/blockwise.py",
        "m + l.log())",
        "m + l.log() + math.log(2))",
        TORCH,
    ),
    Break(
        "jax: lse off by log 2",
        "ring_attn_jax/attend/blockwise.py",
        "m + jnp.log(l))",
        "m + jnp.log(2 * l))",
        JAX,
    ),
    Break(
        "torch: the state rounded at every hop",
        "ring_attn_torch/attend/blockwise.py",
        "(out.to(q.dtype) if last else out)",
        "out.to(q.dtype).to(q.dtype if last else out.dtype)",
        "parity_tests/torch/test_ring.py::test_half_precision_error_does_not_grow_with_the_ring[zigzag-causal-float16]",
    ),
    Break(
        "jax: the state rounded at every hop",
        "ring_attn_jax/attend/blockwise.py",
        "(out.astype(q.dtype) if last else out)",
        "out.astype(q.dtype).astype(q.dtype if last else out.dtype)",
        "parity_tests/jax/test_ring.py::test_half_precision_error_does_not_grow_with_the_ring[float16]",
    ),
    Break(
        "torch: the band off by one",
        "ring_attn_core/runs.py",
        "clamp(-((d - band.lo) // stride),",
        "clamp(1 - ((d - band.lo) // stride),",
        TORCH,
    ),
    Break(
        "jax: the band off by one",
        "ring_attn_core/runs.py",
        "clamp(-((d - band.lo) // stride),",
        "clamp(1 - ((d - band.lo) // stride),",
        JAX,
    ),
    Break(
        "torch: extent off by one",
        "ring_attn_torch/attend/tiles.py",
        "(self.k_pos >= end)",
        "(self.k_pos > end)",
        TORCH_FEATURES,
    ),
    Break(
        "jax: extent off by one",
        "ring_attn_jax/attend/tiles.py",
        "(k_pos < end)",
        "(k_pos <= end)",
        JAX_FEATURES,
    ),
    Break(
        "torch: the key mask ignored from the second hop on",
        "ring_attn_torch/ring/strategies/ring.py",
        "Keys(*self._next.wait())",
        "Keys(self._next.wait()[0])",
        TORCH_FEATURES,
    ),
    Break(
        "jax: the key mask ignored from the second hop on",
        "ring_attn_jax/ring/strategies/ring.py",
        "self.next_keys = keys if self.last else send(keys, hop, ring.axis, ring.plan.ranks)",
        "self.next_keys = keys if self.last else Keys(send(keys.kv, hop, ring.axis, ring.plan.ranks))",
        JAX_FEATURES,
    ),
    Break(
        "torch: softcap's derivative missing",
        "ring_attn_torch/attend/blockwise.py",
        "if tanh is not None:",
        "if tanh is False:",
        TORCH_FEATURES,
    ),
    Break(
        "jax: softcap's derivative missing",
        "ring_attn_jax/attend/blockwise.py",
        "p * dp if tanh is None else p * dp * (1 - tanh * tanh)",
        "p * dp",
        JAX_FEATURES,
    ),
    Break(
        "torch: the sink left out of lse",
        "ring_attn_torch/attend/blockwise.py",
        "row.q_base + row.q_len] = score.sinks",
        "row.q_base + row.q_len] = -math.inf",
        TORCH_FEATURES,
    ),
    Break(
        "jax: the sink left out of lse",
        "ring_attn_jax/attend/blockwise.py",
        "score.sinks.astype(dtype)[None, None], lse)",
        "lse, lse)",
        JAX_FEATURES,
    ),
    Break(
        "torch: dropout keyed by local position",
        "ring_attn_torch/attend/tiles.py",
        "dropout_rate, self.q_pos, self.k_pos)",
        "dropout_rate, self.q_pos - self.row.q_start, self.k_pos)",
        TORCH_FEATURES,
    ),
    Break(
        "jax: dropout keyed by local position",
        "ring_attn_jax/attend/tiles.py",
        "dropout_rate, self.q_pos, self.k_pos)",
        "dropout_rate, self.q_pos - self.row.q_start, self.k_pos)",
        JAX_FEATURES,
    ),
    Break(
        "torch: weights in numpy that share the module's memory",
        "ring_attn_torch/training/weights.py",
        "copy=True",
        "copy=False",
        "parity_tests/torch/test_layers.py::test_weights_in_numpy_are_copies",
    ),
    Break(
        "torch: weights copied before they are checked",
        "ring_attn_torch/training/weights.py",
        "    check_state(",
        "    for name, p in parameters.items(): p.data = torch.tensor(np.asarray(state[name]))\n    check_state(",
        "parity_tests/torch/test_layers.py::test_a_state_with_one_name_too_many_changes_nothing",
    ),
    Break(
        "jax: weights copied before they are checked",
        "ring_attn_jax/training/weights.py",
        "    check_state(",
        "    for name, (path, p) in parameters.items():\n"
        "        nnx.update(module, nnx.from_flat_state([(path, p.replace(_turned(path, state[name])))]))\n"
        "    check_state(",
        "parity_tests/jax/test_layers.py::test_a_state_with_one_name_too_many_changes_nothing",
    ),
    Break(
        "torch: extents of a block unchecked",
        "ring_attn_torch/block.py",
        'if block.score.extents is not None and q.device.type == "cpu":',
        "if False:",
        "parity_tests/torch/test_block.py::test_wrong_extents_are_found_in_a_block_too",
    ),
    Break(
        "jax: a block's mask beyond int32",
        "ring_attn_jax/block.py",
        "mask.clamped(FARTHEST)",
        "mask",
        "parity_tests/jax/test_block.py::test_a_mask_beyond_every_lag_goes_with_a_traced_run",
    ),
    Break(
        "jax: a block's arrays left to vary as they do",
        "ring_attn_jax/block.py",
        "vary_alike((), Inputs(q, k, v, key_mask, prepared.scored(arrays)), rows)",
        "(Inputs(q, k, v, key_mask, prepared.scored(arrays)), rows)",
        "parity_tests/jax/test_block.py::test_gradients_of_what_every_rank_holds_alike_are_summed_over_blocks_elsewhere",
    ),
    Break(
        "torch: another rank's NotImplementedError raised as something else",
        "ring_attn_torch/ring/agreement.py",
        ', "NotImplementedError": NotImplementedError}',
        "}",
        "parity_tests/torch/test_agreement.py::test_an_objection_is_raised_everywhere_as_what_it_was",
    ),
    Break(
        "torch: the batch row of dropout wider than a word",
        "ring_attn_torch/attend/dropout.py",
        "torch.arange(batch, device=draw.device) & WORD",
        "torch.arange(batch, device=draw.device)",
        "parity_tests/torch/test_ring.py::test_batch_rows_and_heads_are_counted_modulo_2_to_the_32",
    ),
    Break(
        "jax: hops that wait for nothing",
        "ring_attn_jax/ring/strategies/ring.py",
        "        if not self.last:\n            state",
        "        if False:\n            state",
        "parity_tests/jax/test_shard_map.py::test_no_hop_begins_before_the_step_before_it_has_ended",
    ),
]


def main(names: list[str]) -> int:
    chosen = [b for b in BREAKS if not names or any(name in b.name for name in names)]
    for whole in dict.fromkeys(b.test for b in chosen):
        if run(ROOT, whole) != 0:
            print(f"NOT BROKEN, and already red: {whole}")
            return 1
    for b in chosen:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "checkout"
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "demo-output", "build", "dist"))
            text = (copy / b.file).read_text()
            if text.count(b.old) != 1:
                print(f"STALE: {b.old!r} stands {text.count(b.old)} times in {b.file} ({b.name}): update parity_tests/mutate.py")
                return 1
            (copy / b.file).write_text(text.replace(b.old, b.new))
            red = run(copy, b.test) == 1
        print(f"{'red ' if red else 'GREEN'} {time.perf_counter() - began:5.1f} s  {b.name}: {b.test}", flush=True)
        if not red:
            return 1
    print(f"{len(chosen)} of {len(chosen)} breaks were noticed")
    return 0


def run(folder: Path, test: str) -> int:
    """pytest's exit status: 0 green, 1 red, anything else: it did not come to testing."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        print(done.stdout + done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
