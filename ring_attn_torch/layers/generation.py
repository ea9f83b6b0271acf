"""The mixin by which a transformer generates text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ring_attn_core.model.generation import OnToken, Progress

from ..inference.generate import generated


class Generates:
    """The ``generate`` method of RingTransformer."""

    def generate(
        self,
        prompts: Sequence[Any],
        max_new_tokens: int | Sequence[int],
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[int] = (),
        seed: int = 0,
        on_token: OnToken | None = None,
        chunk: int | None = None,
        cache_dtype: str | None = None,
        progress: Progress | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of every prompt, at most ``max_new_tokens``, up to and including the first one in ``stop``.

        ``max_new_tokens``: an int, or one for each prompt; a finished request takes part in no more steps.

        ``prompts``: lists or arrays of token ids, of any lengths, the same on every rank; the ring divides them. Prompts are
        prefilled in shards of the model's layout; each step then computes the next token of all requests, until all have
        finished.

        ``temperature`` 0: the most probable token. Otherwise one is drawn from ``softmax(logits / temperature)`` over the
        ``top_k`` most probable tokens, and of these the fewest whose probabilities sum to ``top_p``. A draw depends only on the
        logits, ``seed``, the prompt's index and the position: it is the same on any ring, in either framework, and beside any
        other prompts.

        ``on_token(request, token)``: called on every rank for each new token. ``chunk``: the maximum tokens of a prompt in one
        prefill, which limits the memory of activations; None: all. ``progress(done, total)``: called after each chunk with tokens
        of the prompts. ``cache_dtype``: "float8_e4m3fn", or None for the compute dtype. Dropout is off.

        Raise ValueError, the same on every rank and before anything is sent, on: empty prompts, text, ids outside the vocabulary,
        numbers outside their range, ``top_k`` or ``top_p`` at temperature 0, masks that are neither causal nor a window before
        the token, weights that are split over ranks (FSDP, tensor parallelism), a chunk shorter than a prompt if the model has
        ALiBi, and arguments that differ between ranks.
        """
        arguments: dict[str, Any] = {"prompts": prompts, "new": max_new_tokens, "stop": stop, "chunk": chunk}
        arguments |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "cache_dtype": cache_dtype}
        return generated(self, arguments, on_token, progress)
