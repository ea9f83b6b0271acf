"""A transformer whose sequence is sharded over a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ring_attn_core.constructor import extract, takes
from ring_attn_core.model.checks import check_activations, check_auto_shard, check_flags
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.generation import OnToken, Progress
from ring_attn_core.model.masks import layer_offset
from ring_attn_core.model.mixers import check_mixers_call
from ring_attn_core.plan.balanced_layout import BalancedLayout

from ..axes import ring_size, sharded_like
from ..call.traced import TracedLayout
from ..inference.generate import generate_tokens
from .activations import caller
from .auto_shard import ShardedRows
from .block import Block, mixer_of
from .layout_check import check_layout
from .parts import LinearMap, RMSNorm, dtype_name, look_up, product, reshard
from .ring import LayerArguments, LayerRing


@dataclass(frozen=True, kw_only=True)
class ModelRing(LayerRing):
    """The ring of a RingTransformer, and the arguments ``auto_shard`` and ``activations``, which its config does not store."""

    auto_shard: bool = False
    activations: str = "keep"


@dataclass(frozen=True, kw_only=True)
class TransformerArguments(LayerArguments, ModelRing, TransformerConfig):
    """The arguments of RingTransformer."""

    vocab: int = field(kw_only=False)
    depth: int = field(kw_only=False)
    hidden: int | None = None
    compute_dtype: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compute_dtype is not None:
            object.__setattr__(self, "compute_dtype", dtype_name(self.compute_dtype))


@dataclass(frozen=True, kw_only=True)
class FromConfig(ModelRing):
    """The arguments of RingTransformer.from_config."""

    config: TransformerConfig = field(kw_only=False)
    rngs: nnx.Rngs


class RingTransformer(nnx.Module):
    """Decoder-only transformer as in Llama: embedding, ``depth`` pre-norm blocks of RingAttention and SwiGLU, norm, head.

    ``vocab``: number of token ids. ``hidden``: features inside the MLP; None is 8/3 dim, rounded up to a multiple of 64.
    ``tied``: the head uses the embedding's weight. ``mlp_bias``: the MLP's linear maps have biases. ``published``: the data that
    ``load_llama`` keeps for ``save_llama``. ``compute_dtype``: dtype of the activations (None: the weights' dtype). Weights are
    cast to it at use. So gradients of float32 weights, and their sums over ranks, are float32 for any ``compute_dtype``.
    ``mlp_chunk``: the maximum number of a rank's tokens that the MLP computes at a time, None for all. It limits the memory of
    the ``hidden`` features, but the backward recomputes them once. If ``activations`` is not "keep", the backward recomputes them
    once in any case. The other arguments are those of :class:`RingAttention`.

    ``windows``: one value per layer. The layer's mask is the part of ``mask`` with ``|q_pos - k_pos| <= window``, or all of
    ``mask`` for None. ``rotaries``: one value per layer in place of ``rotary``: a Rotary, a base, or None for a layer without
    rotary embedding. ``mixers``: one value per layer, "attention", "gated_delta_net" or "mamba2": a :class:`GatedDeltaNet` or
    :class:`Mamba2` takes the place of attention, with ``extents`` as its documents. Such a model refuses ``key_mask``,
    ``key_extents`` and striped shards. ``eps``: the epsilon of all norms, 1e-5 in Llama 3. The field
    ``config`` holds the model's sizes and options as one record; :meth:`from_config` makes a model of them from this record.

    ``auto_shard``, with ``mesh``: a call takes global sequences in natural order, ``model(ids, mask=None)``, and returns global
    logits.

    ``activations``: the arrays that a block saves for its backward. "keep": those that JAX saves by default. "recompute": the
    block's input and attention's (out, lse); from these the backward recomputes the rest of the block without the ring.
    "offload": the same arrays, in host memory of the kind pinned_host; the gradient must then be computed inside jax.jit.

    JAX sums the gradients of replicated weights over the ranks by itself, unless they are computed inside
    ``shard_map(check_vma=False)``. If the axes of ``mesh`` are Explicit, the default of jax.make_mesh, call
    ``jax.set_mesh(mesh)`` before the constructor. Raise ValueError if sizes do not fit, a number is outside its range, or the
    mesh lacks an axis.
    """

    @takes(TransformerArguments)
    def __init__(self, arguments: TransformerArguments) -> None:
        check_activations(arguments.activations)
        self.activations, rngs = arguments.activations, arguments.rngs
        self.config = config = extract(TransformerConfig, arguments)
        check_flags(auto_shard=arguments.auto_shard)
        if arguments.auto_shard and arguments.mesh is None:
            raise ValueError("auto_shard=True shards whole arrays over a mesh: pass mesh=...")
        self.auto_shard, self.ring = arguments.auto_shard, extract(LayerRing, arguments)
        self.compute_dtype = None if config.compute_dtype is None else jnp.dtype(config.compute_dtype)
        init, kept = nnx.initializers.normal(0.02), jnp.dtype(config.param_dtype)
        self.embed = nnx.Embed(config.vocab, config.dim, embedding_init=init, param_dtype=kept, rngs=rngs)
        layers = (mixer_of(config, layer, self.ring, rngs=rngs) for layer in range(config.depth))
        self.blocks = nnx.List(Block(each, config.hidden, config.mlp_chunk, config.mlp_bias, rngs=rngs) for each in layers)
        self.norm = RMSNorm(config.dim, config.eps, config.param_dtype)
        self.head = None if config.tied else LinearMap(config.dim, config.vocab, False, config.param_dtype, rngs=rngs)

    @classmethod
    @takes(FromConfig)
    def from_config(cls, arguments: FromConfig) -> RingTransformer:
        """Construct a model from ``config``. Pass arguments that ``config`` does not hold, such as the ring, by name."""
        return cls(**arguments.config.arguments, **vars(extract(ModelRing, arguments)), rngs=arguments.rngs)

    def __call__(
        self,
        ids: jax.Array,
        positions: jax.Array | None = None,
        length: int | None = None,
        *,
        extents: jax.Array | None = None,
        key_extents: jax.Array | None = None,
        key_mask: jax.Array | None = None,
        longest_path: int | None = None,
        layout: BalancedLayout | TracedLayout | None = None,
        dropout_seed: int | jax.Array | None = None,
        dropout_offset: tuple[int | jax.Array, int | jax.Array] = (0, 0),
        mask: jax.Array | None = None,
        return_hidden: bool = False,
    ) -> jax.Array:
        """Return the logits [b s vocab] of token ids int [b s], this rank's shard in layout order (with a mesh: global).

        Logits are in the compute dtype; ids outside the vocabulary give NaN. ``return_hidden``: return the input of the head [b s
        dim] instead, for :func:`loss` with ``head=model.head_weight`` or :func:`gather_token` of the last token. ``positions``,
        ``length``, ``extents``, ``key_extents``, ``key_mask``, ``longest_path``, ``layout``: as in :class:`RingAttention`;
        ``shard_batch`` returns them. Raise ValueError if ids are not integers [b s], or if a layer refuses an argument.

        Raise ValueError if a nonempty extent begins after its query under a causal mask. With ``longest_path`` also raise it if a
        nonempty key extent does not contain its own token. Both point to a call that omits the shard's ``layout``. If the arrays
        are traced, or partly on devices of other processes, nothing is raised, and the logits of such tokens are NaN.

        ``dropout_seed``: dropout applies only if it is passed. One seed serves all layers. Head h of layer i, both counted from
        0, draws the random numbers of head ``i * heads + h``, so layers drop independently. ``dropout_offset``: as in
        ring_attention; (global index of the first batch row, 0) if ranks hold different rows. It is set automatically with
        ``mesh``.

        With ``auto_shard``: ``ids`` are global, int [batch, tokens] in natural order. ``mask``, bool of the same shape, is False
        where a token is padding. The result is global logits [batch, tokens, vocab]. ``positions``, ``length``, ``extents``,
        ``key_extents``, ``key_mask``, ``longest_path`` and ``layout`` are refused.
        """
        self.ring.check_axis(self)
        masks: dict[str, Any] = {"extents": extents, "key_extents": key_extents, "key_mask": key_mask}
        masks |= {"longest_path": longest_path, "layout": layout}
        refused = {"key_extents": key_extents, "key_mask": key_mask, "longest_path": longest_path, "mask": mask}
        ranks = ring_size(self.ring.axis_name) if self.ring.mesh is None else self.ring.mesh.shape[self.ring.axis_name]
        check_mixers_call(self.config.mixers, layout or self.ring.layout, ranks, **refused)
        check_auto_shard(self.auto_shard, mask, positions=positions, length=length, **masks)
        rows = ShardedRows.of(ids, mask, self.ring) if self.auto_shard else None
        if rows is not None:
            ids, masks["key_mask"], length = rows.shard(ids), rows.shard_mask(mask), rows.length
        if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"ids must be integers [batch, tokens], got {ids.dtype} {list(ids.shape)}")
        if positions is None and longest_path is None:
            positions = self.ring.positions(ids.shape[1], layout)
        causal = self.config.mask.lo is not None and self.config.mask.lo >= 0
        tree = key_extents if longest_path is not None else None
        x = check_layout(self.embedded(ids), extents if causal else None, tree, length, layout, self.ring)
        call = caller(self.activations)
        for layer, block in enumerate(self.blocks):
            offset = layer_offset(dropout_offset, layer, self.config.heads)
            x = block(x, positions, length, **masks, dropout_seed=dropout_seed, dropout_offset=offset, call=call)
        x = self.norm(x)
        x = x if return_hidden else self.logits(x)
        return x if rows is None else rows.unshard(x)

    def embedded(self, ids: jax.Array) -> jax.Array:
        """Return the input of the first block [b s dim] for token ids [b s]."""
        weight = self.embed.embedding[...]
        return look_up(weight, ids).astype(self.compute_dtype or weight.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return the logits [... vocab] of the last block's normed output [... dim]."""
        if self.head is not None:
            x = self.head(hidden)
        else:
            x = product(hidden, self.embed.embedding[...].T.astype(hidden.dtype))
        return reshard(x, PartitionSpec(*sharded_like(x)[:-1], None))

    @property
    def head_weight(self) -> jax.Array:
        """The weight [vocab, dim] of ``logits = hidden head_weight^T``. If the head is tied, this is the embedding's weight."""
        return self.embed.embedding[...] if self.head is None else self.head.kernel[...].T

    def generate(
        self,
        prompts: Sequence[Any],
        max_new_tokens: int | Sequence[int],
        *,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int | None] | None = None,
        top_p: float | Sequence[float | None] | None = None,
        stop: Sequence[int] = (),
        seed: int = 0,
        on_token: OnToken | None = None,
        chunk: int | None = None,
        cache_dtype: str | None = None,
        progress: Progress | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, at most ``max_new_tokens``, up to and including the first stop id.

        ``max_new_tokens``: an int, or a sequence with an int for each prompt. ``stop``: ids after which a prompt is finished.
        Later steps skip a finished prompt.

        ``prompts``: lists or arrays of token ids, of any lengths, the same in each process. The ring shards the prompts in the
        model's layout and prefills them. Each step then computes the next token of all prompts, until all are finished.

        ``temperature`` 0: the most probable token. Otherwise a token is drawn from ``softmax(logits / temperature)``. ``top_k``
        restricts the draw to the k most probable tokens, and ``top_p`` then to the fewest of these with a total probability of at
        least p. Each of these three arguments may be a list or a 1-D array with a value for each prompt. A draw depends only on
        the prompt's logits, these arguments, ``seed``, the prompt's index and the position. So unless rounding decides, equal
        logits give the same draw on any ring, in either framework, and with any other prompts.

        ``on_token(request, token)``: called for each new token; ``request`` is the prompt's index. ``chunk``: the maximum number
        of tokens of a prompt in one prefill, None for all. It limits the memory of activations. ``progress(done, total)``: called
        after each chunk with the numbers of prefilled and of all prompt tokens. ``cache_dtype``: the dtype of the cache,
        "float8_e4m3fn", or None for the compute dtype. Dropout is off.

        A model with a mesh generates on all devices of the mesh, a model without a mesh on its own device. Weights sharded over
        the mesh are gathered one layer at a time. Do not call ``generate`` inside jit or shard_map. The decode step is compiled
        once per number of requests and cache size. Prompt lengths are rounded up so that few sizes occur.

        Raise ValueError, before anything is computed, for empty prompts, text, ids outside the vocabulary, numbers outside their
        range, ``top_k`` or ``top_p`` at temperature 0, or different arguments in the processes of a program. Raise ValueError
        also if a layer's mask is neither causal nor a sliding window of earlier tokens, if a model with ``mesh`` has a
        ``head_axis``, if weights are sharded in another way than over ``mesh``, or if a model with ALiBi gets a chunk shorter
        than a prompt.
        """
        arguments: dict[str, Any] = {"prompts": prompts, "new": max_new_tokens, "stop": stop, "chunk": chunk}
        arguments |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "cache_dtype": cache_dtype}
        return generate_tokens(self, arguments, on_token, progress)
