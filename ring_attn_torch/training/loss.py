"""The loss over all labels of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..layers.attention import ring_of
from ..ring.groups import ranks_of


def loss(
    logits: Tensor, labels: Tensor, *, group: dist.ProcessGroup | DeviceMesh | None = None, ignore_index: int = -100
) -> Tensor:
    """Mean cross-entropy over every label of every rank that is not ``ignore_index``, in float32: the same scalar on all ranks.

        sum_ranks sum_tokens (log sum_v exp(logits_v) - logits_label) / sum_ranks number of labels          0 without any label

    logits [b s vocab] and labels int [b s], the next token of each (``shard_batch`` shifts them before it shards). ``group``: all
    ranks that hold different tokens, data parallel ones included; None is the default group.

    Its gradient on a rank is that rank's part of the gradient: the *sum* over the ranks (:func:`sum_gradients`) is one device's.
    DistributedDataParallel and FSDP take the mean over ranks: with them, multiply the loss by their number. Raises ValueError for
    shapes that do not fit and IndexError (on a GPU a device assertion) for labels outside the vocabulary.
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels must be {list(logits.shape[:-1])} for logits {list(logits.shape)}, got {list(labels.shape)}")
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.long()  # unsigned ones have no place for ignore_index
    part = F.cross_entropy(wide, labels.flatten(), ignore_index=ignore_index, reduction="sum")
    total = torch.stack([part.detach(), (labels != ignore_index).sum().to(part.dtype)])
    ring = ring_of(group)
    if ranks_of(ring) > 1:
        dist.all_reduce(total, group=ring)
    value, count = total[0], total[1].clamp(min=1)
    mean = part / count
    with torch.no_grad():
        mean.copy_(value / count)  # everybody's value, equal to the bit, with the gradient of this rank's part
    return mean
