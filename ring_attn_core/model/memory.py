"""Peak memory of training per GPU, and host memory per GPU. Each is a sum of terms, and each term has its formula.

Weights, their gradients and AdamW's two moment estimates, all in ``param_dtype``, are sharded over all GPUs (FSDP). A block
computes in ``compute_dtype`` with gathered weights in that dtype. The peak is the memory in use throughout the step, plus the
largest additional memory in a phase of the step, such as the loss. ``StepMemory.moments`` holds these phases.

Symbols    T tokens per GPU, d dim, h heads, g kv_heads, e head_dim, f hidden, V vocab, L depth, N gpus, P weights, B weights of
           a block, w bytes per element of param_dtype, c bytes per element of compute_dtype; a float32 has 4 bytes
Source     the tensors that autograd saves in this library's PyTorch layers; a test compares their sizes with the formulas
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from .checks import MAX_INT32, check_activations, check_sizes
from .config import TransformerConfig
from .mixers import refuse_mixers

GIB = 2**30
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
STEP = 1024


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training settings that determine memory, besides the model.
    ``tokens``: per GPU, over its batch rows. ``mlp_chunk``, ``loss_chunk``: tokens at once; None: all. ``reserve``: bytes per GPU
    other than tensors (CUDA's context, NCCL's buffers, workspaces, gaps between tensors)."""

    gpus: int
    tokens: int
    activations: str = "offload"
    mlp_chunk: int | None = 4096
    loss_chunk: int | None = 4096
    reserve: int = 4 * GIB

    def __post_init__(self) -> None:
        chunks = {"mlp_chunk": self.mlp_chunk, "loss_chunk": self.loss_chunk}
        check_sizes(gpus=self.gpus, tokens=self.tokens, **{name: x for name, x in chunks.items() if x is not None})
        check_activations(self.activations)


class Term(NamedTuple):
    """A term of the memory formula: its name ``what``, its ``size`` in bytes, and its formula in ``words``."""

    what: str
    size: int
    words: str


class StepMemory(NamedTuple):
    """A step's memory per GPU as terms: ``stays`` throughout, ``moments`` of each phase in addition, ``host`` memory."""

    stays: tuple[Term, ...]
    moments: dict[str, tuple[Term, ...]]
    host: tuple[Term, ...]

    @property
    def worst(self) -> str:
        return max(self.moments, key=lambda name: total(self.moments[name]))

    @property
    def peak(self) -> int:
        """Return the bytes on a GPU in the phase with the most memory."""
        return total(self.stays) + total(self.moments[self.worst])


def total(terms: Iterable[Term]) -> int:
    return sum(term.size for term in terms)


def block_weights(config: TransformerConfig) -> int:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    biases = (q + 2 * kv) * config.qkv_bias + config.dim * config.o_bias + (2 * config.hidden + config.dim) * config.mlp_bias
    extras = biases + 2 * config.head_dim * config.qk_norm + config.heads * config.sinks
    return 2 * config.dim * (q + kv) + extras + 3 * config.dim * config.hidden + 2 * config.dim


def weights(config: TransformerConfig) -> int:
    """Return the number of parameters of the model."""
    return config.depth * block_weights(config) + _ends(config) + config.dim


def _ends(config: TransformerConfig) -> int:
    """Return the number of parameters of the embedding, and of the head unless it is tied."""
    return config.vocab * config.dim * (1 if config.tied else 2)


def block_kept(config: TransformerConfig, tokens: int) -> tuple[Term, ...]:
    """Return the terms that a block stores until its backward with any ``activations``; "keep" adds ``block_saved``."""
    c = compute_bytes(config)
    return (
        Term("input", tokens * config.dim * c, "T d c: the input of the block"),
        Term("out", tokens * config.heads * config.head_dim * c, "T h e c: attention's result"),
        Term(
            "lse",
            tokens * config.heads * (2 * c if c >= 4 else 4),
            "4 T h: log of the denominator; 2 T h c from float32 on (with rest)",
        ),
    )


def block_saved(config: TransformerConfig, tokens: int, mlp_chunk: int | None = None) -> tuple[Term, ...]:
    """Return the terms that autograd saves in a block beside ``block_kept``: in every block with "keep", else in one at a time.
    A chunked MLP computes its activations again: term 0. Each norm is taken to save its input, as PyTorch does on a GPU."""
    c, q, kv = compute_bytes(config), config.heads * config.head_dim, config.kv_heads * config.head_dim
    angles = 0 if config.rotary is None and config.rotaries is None else 2
    chunk = 0 if mlp_chunk is not None else tokens
    return (
        Term("attention's input", tokens * config.dim * c, "T d c: behind the first norm"),
        Term("q, k, v", tokens * (q + 2 * kv) * c, "T (h + 2 g) e c: behind the rotary embedding"),
        Term("heads to norm", tokens * (q + kv) * c * config.qk_norm, "T (h + g) e c: q and k before their norms"),
        Term("angles", tokens * angles * config.head_dim * 4, "8 T e: cos and sin, the same for q and k, in float32"),
        Term("sum", tokens * config.dim * c, "T d c: the input and attention, which the second norm takes"),
        Term("MLP's input", tokens * config.dim * c, "T d c: behind the second norm"),
        Term(
            "MLP",
            4 * chunk * config.hidden * c,
            "4 T f c: gate, silu(gate), up and product; 0 in chunks, which compute them again",
        ),
    )


def compute_bytes(config: TransformerConfig) -> int:
    return BYTES[config.compute_dtype or config.param_dtype]


def peak_memory(config: TransformerConfig, training: Training) -> StepMemory:
    """Return the memory that a training step takes on each GPU, and on the host for each GPU."""
    refuse_mixers("memory is computed of attention layers", config.mixers, "measure a step of this model instead")
    tokens, depth = training.tokens, config.depth
    kept, saved = block_kept(config, tokens), block_saved(config, tokens, training.mlp_chunk)
    stays, host = _weights(config, training), ()
    here = total(kept)
    if training.activations == "keep":
        stays += (Term("activations", depth * (here + total(saved)), "L times all that autograd saves of a block"),)
        saved = ()
    elif training.activations == "recompute":
        stays += (Term("kept", depth * here, "L T (d c + h e c + 4 h): input, out and lse of every block"),)
    else:
        blocks = min(2, depth)
        stays += (
            Term("on their way", blocks * here, "2 T (d c + h e c + 4 h): input, out and lse of the block at work and the next"),
        )
        host = (Term("offloaded", depth * here, "L T (d c + h e c + 4 h): input, out and lse of every block, in pinned memory"),)
    moments = {
        "attention": (*(x for x in saved if x.what not in OF_MLP), *_rotary(config, tokens)),
        "loss": _loss(config, training),
        "backward of an MLP": (*saved, *_mlp(config, training)),
        "backward of an attention": (*(x for x in saved if x.what not in OF_MLP), *_attention(config, tokens)),
    }
    return StepMemory(stays, moments, host)


OF_MLP = ("MLP", "MLP's input", "sum")
"""Names of terms: activations that are made after attention's forward and freed before attention's backward."""


def _weights(config: TransformerConfig, training: Training) -> tuple[Term, ...]:
    w, c, shared = BYTES[config.param_dtype], compute_bytes(config), -(-weights(config) // training.gpus)
    block, ends = block_weights(config), _ends(config)
    return (
        Term("weights", shared * w, "P w / N: this GPU's part of the weights"),
        Term("moments", 2 * shared * w, "2 P w / N: its part of AdamW's two moments"),
        Term("gradients", shared * w, "P w / N: its part of the gradients"),
        Term("whole weights", (2 * block + ends) * c, "(2 B + embedding and head) c: of the block at work and the next one"),
        Term("whole gradients", block * (c + 8) + ends * c, "B (c + 8) + embedding and head c: on their way to who keeps them"),
        Term("reserve", training.reserve, "what is no tensor: CUDA, NCCL, workspaces, gaps"),
    )


def _loss(config: TransformerConfig, training: Training) -> tuple[Term, ...]:
    c, chunk = compute_bytes(config), min(training.loss_chunk or training.tokens, training.tokens)
    return (
        Term("hidden", 3 * training.tokens * config.dim * c, "3 T d c: before and behind the last norm, and its gradient"),
        Term("logits", chunk * config.vocab * (2 * c + 8), "chunk V (2 c + 8): logits and their gradient, also in float32"),
        Term("head's gradient", config.vocab * config.dim * 4, "4 V d: summed over chunks in float32"),
    )


def _mlp(config: TransformerConfig, training: Training) -> tuple[Term, ...]:
    c, chunk = compute_bytes(config), min(training.mlp_chunk or training.tokens, training.tokens)
    again = 4 if training.mlp_chunk is not None else 0
    return (
        Term("gradients of the stream", 3 * training.tokens * config.dim * c, "3 T d c: of output, sum and MLP's input"),
        Term(
            "MLP at work", (3 + again) * chunk * config.hidden * c, "(4 + 3) chunk f c: a chunk computed again, and its gradients"
        ),
    )


def _rotary(config: TransformerConfig, tokens: int) -> tuple[Term, ...]:
    c, q = compute_bytes(config), config.heads * config.head_dim
    return (
        Term("stream", tokens * config.dim * c, "T d c: what the blocks before hand on"),
        Term(
            "queries turned",
            tokens * q * (12 + c),
            "T h e (12 + c): before they are turned, and three arrays in float32: their copy, it times cos, it rolled",
        ),
    )


def _attention(config: TransformerConfig, tokens: int) -> tuple[Term, ...]:
    c, q, kv = compute_bytes(config), config.heads * config.head_dim, config.kv_heads * config.head_dim
    return (
        Term("gradients of the stream", 2 * tokens * config.dim * c, "2 T d c: of the sum and of attention's input"),
        Term(
            "gradients of queries",
            tokens * q * (2 * c + 4),
            "T h e (2 c + 4): of out, once more with blind queries cleared; dq in float32",
        ),
        Term("keys of the ring", 4 * tokens * kv * c, "2 T 2 g e c: k and v at work, and those that arrive"),
        Term("gradients of keys", 3 * 2 * tokens * kv * 4, "3 T 2 g e 4: dk and dv at work, leaving and arriving, in float32"),
    )


def longest(config: TransformerConfig, training: Training, memory: int, host: int | None = None) -> int:
    """Return the most tokens per GPU, a multiple of ``STEP``, whose step fits; 0 if none do. ``memory``, ``host``: bytes."""

    def exceeds(tokens: int) -> bool:
        needed = peak_memory(config, replace(training, tokens=tokens))
        return needed.peak > memory or (host is not None and total(needed.host) > host)

    return STEP * bisect_left(range(STEP, MAX_INT32 + 1, STEP), True, key=exceeds)
