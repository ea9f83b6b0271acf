"""A transformer whose sequence is sharded over a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ring_attn_core.constructor import extract, takes
from ring_attn_core.model.checks import check_activations, check_auto_shard, check_flags
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.generation import OnToken, Progress
from ring_attn_core.model.masks import layer_offset
from ring_attn_core.model.mixers import check_mixers_call
from ring_attn_core.plan.balanced_layout import BalancedLayout

from ..call.autograd import eager_only
from ..inference.generate import generate_tokens
from ..ring.agreement import same_error
from ..ring.groups import local, ring_of
from .activations import caller
from .auto_shard import ShardedRows
from .block import Block, mixer_of
from .layout_check import agree_on_places, agree_on_tree
from .parts import LinearMap, RMSNorm, dtype_name
from .ring import LayerArguments, LayerRing


@dataclass(frozen=True, kw_only=True)
class ModelRing(LayerRing):
    """The ring of a RingTransformer, and the arguments ``auto_shard`` and ``activations``, which its config does not store."""

    auto_shard: bool = False
    activations: str = "keep"


@dataclass(frozen=True, kw_only=True)
class TransformerArguments(LayerArguments, ModelRing, TransformerConfig):
    vocab: int = field(kw_only=False)
    depth: int = field(kw_only=False)
    hidden: int | None = None
    compute_dtype: torch.dtype | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compute_dtype is not None:
            object.__setattr__(self, "compute_dtype", dtype_name(self.compute_dtype))


@dataclass(frozen=True, kw_only=True)
class FromConfig(ModelRing):
    config: TransformerConfig = field(kw_only=False)


class RingTransformer(nn.Module):
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

    ``auto_shard``: a call takes global sequences in natural order, ``model(ids, mask=None)``, and returns the global logits of
    the rows that this rank passed. Ranks may pass different numbers of rows. If all pass the same rows, each is computed once.

    ``activations``: the tensors that a block saves for its backward. "keep": all tensors. "recompute": the block's input and
    attention's (out, lse); from these the backward recomputes the rest of the block without the ring. "offload": the same
    tensors, in host memory. On CUDA this memory is pinned, and copies overlap the computation: while the backward computes a
    block, it already copies back the tensors of the preceding block.

    A rank's gradients are partial: call :func:`sum_gradients` after backward. Raise ValueError if sizes do not fit or a number is
    outside its range.
    """

    @takes(TransformerArguments)
    def __init__(self, arguments: TransformerArguments) -> None:
        super().__init__()
        check_activations(arguments.activations)
        self.activations = arguments.activations
        self.config = config = extract(TransformerConfig, arguments)
        check_flags(auto_shard=arguments.auto_shard)
        self.auto_shard, self.ring = arguments.auto_shard, extract(LayerRing, arguments)
        self.compute_dtype = None if config.compute_dtype is None else getattr(torch, config.compute_dtype)
        self.embed = nn.Embedding(config.vocab, config.dim, dtype=getattr(torch, config.param_dtype))
        nn.init.normal_(self.embed.weight, std=0.02)
        layers = (mixer_of(config, layer, self.ring) for layer in range(config.depth))
        self.blocks = nn.ModuleList(Block(each, config.hidden, config.mlp_chunk, config.mlp_bias) for each in layers)
        self.norm = RMSNorm(config.dim, config.eps, config.param_dtype)
        self.head = None if config.tied else LinearMap(config.dim, config.vocab, False, config.param_dtype)

    @classmethod
    @takes(FromConfig)
    def from_config(cls, arguments: FromConfig) -> RingTransformer:
        """Construct a model from ``config``. Pass arguments that ``config`` does not hold, such as the ring, by name."""
        return cls(**arguments.config.arguments, **vars(extract(ModelRing, arguments)))

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        length: int | None = None,
        *,
        extents: Tensor | None = None,
        key_extents: Tensor | None = None,
        key_mask: Tensor | None = None,
        longest_path: int | None = None,
        layout: BalancedLayout | None = None,
        dropout_seed: int | Tensor | None = None,
        dropout_offset: tuple[int | Tensor, int | Tensor] = (0, 0),
        mask: Tensor | None = None,
        return_hidden: bool = False,
    ) -> Tensor:
        """Return the logits [b s vocab] of token ids int [b s], this rank's shard in layout order.

        Logits are in the compute dtype, or autocast's. ``return_hidden``: return the input of the head [b s dim] instead, for
        :func:`loss` with ``head=model.head_weight`` or :func:`gather_token` of the last token. ``positions``, ``length``,
        ``extents``, ``key_extents``, ``key_mask``, ``longest_path``, ``layout``: as in :class:`RingAttention`; ``shard_batch``
        returns them. Raise ValueError if ids have a wrong shape, are not integers or are outside the vocabulary, or if a layer
        refuses an argument. On a GPU, ids outside the vocabulary fail a device assertion instead. With ``longest_path`` and
        ``key_extents`` raise ValueError on all ranks if the ranks' shards do not belong to the same prefix trees. Under a causal
        mask raise it on all ranks if a nonempty extent begins after its query, for example because ``layout`` is missing. On a
        GPU these two checks are made only at the first call with a batch of a given shape. A compiled model never makes them.

        ``dropout_seed``: dropout applies if and only if it is passed; ``self.training`` is ignored. One seed serves all layers.
        Head h of layer i, both counted from 0, draws the random numbers of head ``i * heads + h``, so layers drop independently.
        ``dropout_offset``: as in ring_attention; (global index of the first batch row, 0) if ranks hold different rows.

        With ``auto_shard``: ``ids`` are global, int [batch, tokens], this rank's own rows or the same rows on all ranks.
        ``mask``, bool of the same shape, is False where a token is padding. The result is global logits [batch, tokens, vocab] of
        these rows. The arguments from ``positions`` to ``layout`` are refused. A backward differentiates the sum of all ranks'
        losses and gives each rank a part of the gradients, so all ranks must call it. With :func:`loss` of global labels, these
        parts add up to the gradients of one device. For dropout, the rows of all ranks are numbered consecutively, in order of
        the ranks.
        """
        masks: dict[str, Any] = {"extents": extents, "key_extents": key_extents, "key_mask": key_mask}
        masks |= {"longest_path": longest_path, "layout": layout}
        with same_error(ring_of(self.ring.group)):
            refused = {"key_extents": key_extents, "key_mask": key_mask, "longest_path": longest_path, "mask": mask}
            check_mixers_call(self.config.mixers, layout or self.ring.layout, self.ring.ranks, **refused)
        check_auto_shard(self.auto_shard, mask, positions=positions, length=length, **masks)
        rows = ShardedRows.of(ids, mask, self.ring) if self.auto_shard else None
        if rows is not None:
            ids, masks["key_mask"], length = rows.shard(ids), rows.shard_mask(mask, ids), rows.length
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            with same_error(ring_of(self.ring.group)):
                raise ValueError(f"ids must be integers [batch, tokens], got {ids.dtype} {list(ids.shape)}")
        ids = ids if ids.dtype in (torch.int32, torch.int64) else ids.long()  # nn.Embedding takes only these dtypes
        if ids.device.type == "cpu" and eager_only([ids]):
            check_ids(ids, self.config.vocab, self.ring)
        if longest_path is not None and key_extents is not None and eager_only([ids, key_extents]):
            agree_on_tree(ids, key_extents, positions, longest_path, layout, self.ring)
        causal = self.config.mask.lo is not None and self.config.mask.lo >= 0
        if causal and extents is not None and eager_only([ids, extents]):
            agree_on_places(ids, extents, length, layout, self.ring)
        if positions is None and longest_path is None:
            with same_error(ring_of(self.ring.group)):
                positions = self.ring.positions(ids.shape[1], ids.device, layout)
        x = self.embedded(ids)
        call = caller(self.activations)
        for layer, block in enumerate(self.blocks):
            offset = layer_offset(dropout_offset, layer, self.config.heads)
            x = block(x, positions, length, **masks, dropout_seed=dropout_seed, dropout_offset=offset, call=call)
        x = self.norm(x)
        x = x if return_hidden else self.logits(x)
        return x if rows is None else rows.unshard(x)

    def embedded(self, ids: Tensor) -> Tensor:
        """Return the input of the first block [b s dim] for token ids [b s]."""
        return self.embed(ids).to(self.compute_dtype or self.embed.weight.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [... vocab] of the last block's normed output [... dim]."""
        if self.head is not None:
            return self.head(hidden)
        return F.linear(hidden, local(self.embed.weight).to(hidden.dtype))

    @property
    def head_weight(self) -> Tensor:
        """The weight [vocab, dim] of ``logits = hidden head_weight^T``. If the head is tied, this is the embedding's weight."""
        return self.embed.weight if self.head is None else self.head.weight

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
        cache_dtype: torch.dtype | str | None = None,
        progress: Progress | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, at most ``max_new_tokens``, up to and including the first stop id.

        ``max_new_tokens``: an int, or a sequence with an int for each prompt. ``stop``: ids after which a prompt is finished.
        Later steps skip a finished prompt.

        ``prompts``: lists or arrays of token ids, of any lengths, the same on every rank. The ring shards the prompts in the
        model's layout and prefills them. Each step then computes the next token of all prompts, until all are finished.

        ``temperature`` 0: the most probable token. Otherwise a token is drawn from ``softmax(logits / temperature)``. ``top_k``
        restricts the draw to the k most probable tokens, and ``top_p`` then to the fewest of these with a total probability of at
        least p. Each of these three arguments may be a list or a 1-D array with a value for each prompt. A draw depends only on
        the prompt's logits, these arguments, ``seed``, the prompt's index and the position. So unless rounding decides, equal
        logits give the same draw on any ring, in either framework, and with any other prompts.

        ``on_token(request, token)``: called on every rank for each new token; ``request`` is the prompt's index. ``chunk``: the
        maximum number of tokens of a prompt in one prefill, None for all. It limits the memory of activations.
        ``progress(done, total)``: called after each chunk with the numbers of prefilled and of all prompt tokens.
        ``cache_dtype``: the dtype of the cache, "float8_e4m3fn", or None for the compute dtype. Dropout is off.

        Raise ValueError, the same on every rank and before any array is sent, if an argument is invalid or differs between ranks.
        Invalid arguments include empty prompts, text, ids outside the vocabulary, ``top_k`` or ``top_p`` without effect at
        temperature 0, and a chunk shorter than a prompt if the model has ALiBi. Raise it too if a layer's mask is neither causal
        nor a sliding window of earlier tokens, or if weights are split over ranks (FSDP, tensor parallelism).
        """
        arguments: dict[str, Any] = {"prompts": prompts, "new": max_new_tokens, "stop": stop, "chunk": chunk}
        cache_dtype = dtype_name(cache_dtype) if isinstance(cache_dtype, torch.dtype) else cache_dtype
        arguments |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "cache_dtype": cache_dtype}
        return generate_tokens(self, arguments, on_token, progress)


def check_ids(ids: Tensor, vocab: int, ring: LayerRing) -> None:
    strange = ids[(ids < 0) | (ids >= vocab)]
    if len(strange):
        with same_error(ring_of(ring.group)):
            raise ValueError(
                f"ids hold {strange[0].item()}, and a vocabulary of {vocab} has 0 to {vocab - 1}: make the model with the vocab "
                "of the tokenizer, which the dataset has as .vocab, and where ids are padded, pad with one of these"
            )
