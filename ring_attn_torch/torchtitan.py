"""An inner attention for torchtitan over the ring of the ``cp`` axis, with windows, documents and sinks.

Example:

    from ring_attn_torch.torchtitan import RingInnerAttention, RingDocuments

    for layer in config.layers:                                    # of a model's config
        layer.attention.inner_attention = RingInnerAttention.Config(window_size=(-1, 0))
    class MyTrainer(RingDocuments, Trainer): pass                  # only for packed documents

torchtitan's ``apply_cp_to_forward`` accepts this inner attention as a ScaledDotProductAttention and passes DTensors, which
name the mesh. Shards have the layout "zigzag" if the load balancer is "headtail", and "contiguous" if it is None (no balancer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ring_attn_core.layouts import LAYOUTS, slots
from ring_attn_core.masks import causal, sliding_window
from ring_attn_core.runs import Band
from ring_attn_core.validation import as_number, check_mixin_first, in_words, is_integer, missing_package

if find_spec("torchtitan") is None:
    raise missing_package(__name__, "torchtitan")

from torchtitan.models.common.attention import ScaledDotProductAttention  # type: ignore[import-not-found]

from .call.signature import ring_attention
from .data.extents import document_extents
from .data.layout import to_layout

Base: Any = object
if TYPE_CHECKING:
    from torchtitan.trainer import Trainer as Base  # type: ignore[import-not-found]

LAYOUT_OF = {"headtail": "zigzag", None: "contiguous"}
"""The layout of the shards by torchtitan's load balancer; None: no balancer. A ring supports no other balancers."""

__all__ = ["Documents", "RingDocuments", "RingInnerAttention", "cp_shard"]


class Documents(NamedTuple):
    """The documents of this rank's queries. The inner attention takes them as ``attention_masks``."""

    extents: Tensor
    """First and end (exclusive) of the global positions of each query's document, int32 [batch, local, 2]."""
    layout: str


class RingInnerAttention(ScaledDotProductAttention):
    """An inner attention of torchtitan that attends over the ring of the ``cp`` axis."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        """The config of a RingInnerAttention.

        ``window_size``: the numbers of tokens that a query sees before and after itself, as in VarlenAttention; -1 is unlimited.
        In a causal model the number after is 0: with any other number a token would see later tokens. ``layout``: the layout of
        the shards, for calls without documents. Pass "zigzag" if the load balancer is "headtail", and "contiguous" if it is None;
        a training loop of your own may also use "striped". ``softcap``, ``strategy``: as in ring_attention. Building the module
        raises ValueError if the window is not two integers of at least -1, or if the layout is unknown.
        """

        window_size: tuple[int, int] = (-1, 0)
        softcap: float | None = None
        strategy: str = "ring"
        layout: str = "zigzag"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.mask = _band(config.window_size)
        if not isinstance(config.layout, str) or config.layout not in LAYOUTS:
            raise ValueError(
                f"layout of RingInnerAttention.Config is {in_words(config.layout)}: choose one of {', '.join(LAYOUTS)}. "
                'torchtitan\'s load balancer "headtail" makes "zigzag", and None "contiguous"'
            )
        self.softcap, self.strategy, self.layout = config.softcap, config.strategy, config.layout

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Documents | None = None,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        """Return attention [batch, local, heads, v_dim] of this rank's queries.

        ``q_BLNH``, ``k_BLNH``, ``v_BLNH``: this rank's shards. torchtitan's tensor parallelism finds these by their names.
        ``out_transform``: a function of (out, lse), where lse is [batch, local, heads]; return its result instead of out. For
        example, gpt-oss applies its sinks in this function. ``others``: score_mod and is_causal are checked, the rest is ignored.

        Raise ValueError if attention_masks are not ``Documents``, if score_mod is set, or if is_causal is False. Raise it too if
        q_BLNH is not a DTensor although the default group has several ranks, or if ring_attention refuses an argument.
        """
        if attention_masks is not None and not isinstance(attention_masks, Documents):
            raise ValueError(
                f"RingInnerAttention takes attention_masks of ring_attn_torch.torchtitan.Documents, as RingDocuments and "
                f"cp_shard make them, got a {type(attention_masks).__name__}"
            )
        if others.get("score_mod") is not None or others.get("is_causal") is False:
            raise ValueError(
                "RingInnerAttention takes no score_mod and no is_causal=False: set softcap or window_size in its Config"
            )
        mesh = q_BLNH.device_mesh if isinstance(q_BLNH, DTensor) else None
        q, k, v = (x.to_local() if isinstance(x, DTensor) else x for x in (q_BLNH, k_BLNH, v_BLNH))
        if mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "RingInnerAttention got no DTensors, so the model has no cp axis: set context_parallel_degree above 1 (or call "
                "apply_cp_to_forward in a loop of your own), or take another inner attention"
            )
        ring: dict[str, Any] = {"group": mesh, "layout": self.layout}
        if attention_masks is not None:
            ring |= {"extents": attention_masks.extents, "layout": attention_masks.layout}
        score = {"mask": self.mask, "softcap": self.softcap, "scale": scale}
        lse = out_transform is not None
        result: Any = ring_attention(q, k, v, **score, **ring, strategy=self.strategy, return_lse=lse)
        return result if out_transform is None else out_transform(*result)


class RingDocuments(Base):
    """A mixin for torchtitan's Trainer: each document attends only to itself. A document begins where ``positions`` is 0.

    Use it as ``class MyTrainer(RingDocuments, Trainer)``. Raise ValueError if a class names the Trainer before RingDocuments.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_mixin_first(cls, RingDocuments, lambda kind: kind.__module__.partition(".")[0] == "torchtitan")

    def post_dataloading_process(self, input_dict: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return (inputs, labels, other arguments), as the Trainer does.

        If the batch has ``positions``, the other arguments include this rank's ``Documents`` as attention_masks; a document
        begins where ``positions`` is 0. Raise ValueError if the load balancer of a ``cp`` axis is neither "headtail" nor None.
        """
        mesh = self.parallel_dims.get_mesh("cp") if self.parallel_dims.cp_enabled else None
        balancer = self.config.parallelism.context_parallel_load_balancer if mesh is not None else None
        if balancer not in LAYOUT_OF:
            raise ValueError(f'context_parallel_load_balancer is {balancer!r}, and a ring takes "headtail" or None')
        positions = input_dict.get("positions")
        inputs, labels, others = super().post_dataloading_process(input_dict, labels)
        if positions is not None:
            others["attention_masks"] = documents_of(positions.to(inputs.device), mesh, LAYOUT_OF[balancer])
        return inputs, labels, others


def documents_of(positions: Tensor, mesh: DeviceMesh | None, layout: str) -> Documents:
    """Return this rank's Documents. ``positions``: global [batch, length], 0 at the first token of each document."""
    return Documents(_own(document_extents((positions == 0).cumsum(1)), mesh, layout), layout)


def cp_shard(
    cp_mesh: DeviceMesh, inputs: tuple[Tensor, ...], positions: Tensor, layout: str = "zigzag"
) -> tuple[tuple[Tensor, ...], Documents]:
    """Return (shards, Documents) of this rank, for a training loop of your own.

    ``shards`` holds the shard of each of ``inputs``, in order, then the shard of ``positions``. ``inputs``: global arrays [batch,
    length, ...], such as ids and labels, the same on every rank. ``positions``: [batch, length], 0 at the first token of each
    document. ``layout``: "zigzag", "contiguous" or "striped". torchtitan's function of this name takes other arguments. Raise
    ValueError if the layout is unknown or cannot split the length equally, if ``inputs`` is not a tuple of tensors, or if an
    array does not have the shape stated here.
    """
    if not isinstance(inputs, tuple | list) or not all(isinstance(x, Tensor) for x in inputs):
        raise ValueError(f"cp_shard takes inputs as a tuple of tensors, (ids,) or (ids, labels), got {in_words(inputs)}")
    if not isinstance(positions, Tensor) or positions.ndim != 2:
        row = isinstance(positions, Tensor) and positions.ndim == 1
        hint = "add [None] to a single row" if row else "they count from 0 in each document, or in each row without documents"
        raise ValueError(f"cp_shard takes positions [batch, length], got {in_words(positions)}: {hint}")
    for i, x in enumerate(inputs):
        if x.shape[:2] != positions.shape:
            raise ValueError(
                f"inputs[{i}] of cp_shard is {list(x.shape)} and positions {list(positions.shape)}: all must be whole, of the "
                "same [batch, length]"
            )
    length, ranks = positions.shape[1], cp_mesh.size()
    parts = ranks * slots(layout)
    if length % parts:
        raise ValueError(f"{length} tokens cannot be split into {parts} equal parts of layout={layout!r}: pad them first")
    shards = tuple(_own(x, cp_mesh, layout) for x in (*inputs, positions))
    return shards, documents_of(positions, cp_mesh, layout)


def _own(x: Tensor, mesh: DeviceMesh | None, layout: str) -> Tensor:
    if mesh is None:
        return x
    return to_layout(x, layout, mesh.size()).chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()


def _band(window_size: Any) -> Band:
    pair = isinstance(window_size, tuple | list) and len(window_size) == 2 and all(map(is_integer, window_size))
    if not pair or min(window_size) < -1:
        got = window_size if isinstance(window_size, tuple | list) else in_words(window_size)
        raise ValueError(
            "window_size must be two numbers of tokens, before and after the query, -1 for no limit, such as (20, 0) for the 20 "
            f"tokens before it, got {got}"
        )
    before, after = map(as_number, window_size)
    if before < 0:
        return Band() if after < 0 else causal(after)
    return sliding_window(before, after) if after >= 0 else Band(hi=before)
