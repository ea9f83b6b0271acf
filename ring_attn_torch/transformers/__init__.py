"""Hugging Face's models over a ring: importing this registers ``attn_implementation="ring"``.

import ring_attn_torch.transformers as ring

model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="ring")
with ring.sequence_parallel(model):             # whole input_ids and labels, the same on every rank
    model(input_ids=ids, labels=ids).loss.backward()
"""

from transformers import AttentionInterface, AttentionMaskInterface

from .attention import ring_attention_forward
from .masks import NAME, ring_mask
from .parallel import sequence_parallel
from .settings import enable

AttentionInterface.register(NAME, ring_attention_forward)
AttentionMaskInterface.register(NAME, ring_mask)

__all__ = ["enable", "sequence_parallel"]
