"""The ``generate`` method of a transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ring_attn_core.model.generation import OnToken, Progress

from ..inference.generate import generated


class Generates:
    """The mixin that gives RingTransformer its ``generate`` method."""

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
        """Return the new tokens of each prompt, at most ``max_new_tokens``, up to and including the first stop id.

        ``max_new_tokens``: an int, or one for each prompt; a finished request takes part in no more steps.

        ``prompts``: lists or arrays of token ids, of any lengths, the same in each process; the ring shares them. Prompts are
        prefilled in shards of the model's layout, then each step computes the next token of all requests, until all are finished.

        ``temperature`` 0: the most probable token. Otherwise one is drawn from ``softmax(logits / temperature)`` of the ``top_k``
        most probable tokens, and of these from the fewest whose probabilities sum to ``top_p``. The draw is a function of the
        logits, ``seed``, the prompt's number and the position: it is the same on any ring, in either framework, and with any
        other prompts. ``stop``: ids that end a request.

        ``on_token(request, token)`` is called as tokens come. ``chunk``: the largest number of tokens of a prompt in one prefill,
        which bounds the memory of activations; None: all. ``progress(done, total)``: called after each chunk with tokens of the
        prompts. ``cache_dtype``: "float8_e4m3fn", or None for the compute dtype. Dropout is off.

        A model with ``mesh`` generates over it, one without is a ring of one on its device; not inside jit or shard_map. The step
        is compiled once per number of requests and size of the cache; lengths of prompts are rounded up a little for that.

        Raise ValueError, before anything is computed, if an argument does not fit: empty prompts, text, ids outside the
        vocabulary, numbers outside their range, ``top_k`` or ``top_p`` at temperature 0, masks that are neither causal nor a
        window before the token, weights that are split over devices (FSDP, tensor parallelism), a chunk shorter than a prompt if
        the model has ALiBi, or different arguments in the processes of a program.
        """
        arguments: dict[str, Any] = {"prompts": prompts, "new": max_new_tokens, "stop": stop, "chunk": chunk}
        arguments |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "cache_dtype": cache_dtype}
        return generated(self, arguments, on_token, progress)
