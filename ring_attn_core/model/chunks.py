"""What is computed in chunks of tokens, the loss and the MLP: how long a chunk is, and what is refused."""

from __future__ import annotations

from typing import Any

from ..mistakes import in_words, is_integer

REDUCTIONS = ("mean", "sum")
"""What becomes of the cross-entropies of all labels."""

Shape = tuple[int, ...]


def check_chunk(name: str, chunk: Any) -> None:
    """ValueError for what counts no tokens."""
    if not is_integer(chunk) or chunk < 1:
        raise ValueError(f"{name} is a number of tokens, an int of at least 1, got {in_words(chunk)}")


def even_chunk(tokens: int, chunk: int) -> int:
    """The length of a chunk where ``tokens`` are cut into the fewest of at most ``chunk``: all are equal but for the last."""
    chunks = max(-(-tokens // chunk), 1)
    return max(-(-tokens // chunks), 1)


def check_loss(logits: Shape, labels: Shape, head: Shape | None, chunk: Any, reduction: Any) -> None:
    """ValueError for shapes that do not fit, a chunk without tokens and an unknown reduction; ``head``: None for logits."""
    what = "logits" if head is None else "hidden states"
    if len(logits) < 2:
        raise ValueError(f"{what} must be [batch, tokens, {'vocab' if head is None else 'dim'}], got {list(logits)}")
    if labels != logits[:-1]:
        raise ValueError(
            f"labels must be {list(logits[:-1])} for {what} {list(logits)}, got {list(labels)}: both are this rank's shard, so "
            "shard whole labels as the tokens are, with shard_batch"
        )
    if head is not None and (len(head) != 2 or head[1] != logits[-1]):
        raise ValueError(
            f"head must be [vocab, {logits[-1]}] for hidden states {list(logits)}, got {list(head)}: pass model.head_weight, or "
            "a weight of that orientation; where the first argument is logits, leave head out"
        )
    check_chunk("chunk", chunk)
    if reduction not in REDUCTIONS:
        raise ValueError(f'reduction must be "mean" or "sum", over all labels of all ranks, got {in_words(reduction)}')
