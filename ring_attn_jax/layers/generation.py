"""The method by which a transformer generates text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ring_attn_core.model.generation import OnToken, Progress

from ..inference.generate import generated


class Generates:
    """What RingTransformer has of generation."""

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
        """The new tokens of every prompt, at most ``max_new_tokens``, up to and with the first that is one of ``stop``.

        ``max_new_tokens``: an int, or one for each prompt; a request that has all its tokens takes part in no more steps.

        ``prompts``: lists or arrays of token ids, of any lengths, the same in every process; the ring shares them. Prompts are
        prefilled in shards of the model's layout, then every step computes the next token of all requests, until all have ended.

        ``temperature`` 0: the most probable token. Otherwise one is drawn from ``softmax(logits / temperature)`` of the ``top_k``
        most probable tokens, and of these from the fewest whose probabilities sum to ``top_p``. What is drawn is a function of
        the logits, ``seed``, the prompt's number and the position: the same on any ring, in either framework, and whatever
        other prompts there are.

        ``on_token(request, token)`` is called as tokens come. ``chunk``: the most tokens of a prompt in one
        prefill, so that activations are there for no more; None: all. ``progress(done, total)``: called after each chunk with
        tokens of the prompts. ``cache_dtype``: "float8_e4m3fn", or None for the compute dtype. Dropout is off.

        A model with ``mesh`` generates over it, one without is a ring of one on its device; not inside jit or shard_map. The step
        is compiled once for so many requests and a cache of such a size; lengths of prompts are rounded up a little for that.

        Raises ValueError, before anything is computed, for what does not fit: empty prompts, text, ids outside the vocabulary,
        numbers outside their range, ``top_k`` or ``top_p`` at temperature 0, masks that are neither causal nor a window before
        the token, weights that are split over devices (FSDP, tensor parallelism), a chunk shorter than a prompt where the model
        has ALiBi, and where the processes of a program were given different things.
        """
        arguments: dict[str, Any] = {"prompts": prompts, "new": max_new_tokens, "stop": stop, "chunk": chunk}
        arguments |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "cache_dtype": cache_dtype}
        return generated(self, arguments, on_token, progress)
