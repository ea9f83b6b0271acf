"""Fine-tune a model of Hugging Face on long packed documents with LoRA and transformers' Trainer, over a ring.

    pip install ".[transformers]" "transformers>=5.23" peft
    torchrun --nproc-per-node 4 examples/hf_finetune.py                      # a tiny random Llama on random text, on CPUs
    torchrun --nproc-per-node 8 examples/hf_finetune.py Qwen/Qwen3-8B 262144 # a model, tokens in a row

Each rank has a shard of every row. transformers loads the checkpoints without ring_attn.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

from ring_attn_torch.transformers import RingTrainer

OLDEST = "5.23"
"""The first release of transformers whose TrainingArguments take activation_checkpointing."""


class PackedDocuments(Dataset):
    """Rows of ``length`` tokens, packed with documents of counting numbers: position_ids begin again at each of them."""

    def __init__(self, rows: int, length: int, vocab: int) -> None:
        self.rows, self.length, self.vocab = rows, length, vocab

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(row)
        ids, positions = [], []
        while sum(map(len, ids)) < self.length:
            tokens, first = torch.randint(self.length // 8, self.length // 2, (2,), generator=generator).tolist()
            ids.append((first + torch.arange(tokens)) % self.vocab)
            positions.append(torch.arange(tokens))
        input_ids, position_ids = (torch.cat(parts)[: self.length] for parts in (ids, positions))
        return {"input_ids": input_ids, "position_ids": position_ids, "labels": input_ids.masked_fill(position_ids == 0, -100)}


def main(name: str | None = None, length: str = "256") -> None:
    if Version(transformers.__version__) < Version(OLDEST):
        raise SystemExit(
            f"hf_finetune.py needs transformers {OLDEST} or newer, whose TrainingArguments take activation_checkpointing, and "
            f"this is {transformers.__version__}: pip install 'transformers>={OLDEST}'"
        )
    torch.manual_seed(0)
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=20,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-2 if name is None else 1e-4,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"offload": torch.cuda.is_available()},  # what layers keep waits in host memory
        logging_steps=5,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    if name is None:
        config = LlamaConfig(vocab_size=99, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
        model = LlamaForCausalLM(config)
    else:
        from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    data = PackedDocuments(rows=64, length=int(length), vocab=model.config.vocab_size)
    trainer = RingTrainer(model=model, args=settings, train_dataset=data, loss_chunk=4096)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print("\n".join(f"loss {float(loss):.3f}" for loss in losses))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
