"""Fine-tune a model of Hugging Face on long packed documents with LoRA and transformers' Trainer, sequences split over a ring.

    pip install ".[transformers]" accelerate peft
    torchrun --nproc-per-node 4 examples/hf_finetune.py                      # a tiny random Llama on random text, on CPUs
    torchrun --nproc-per-node 8 examples/hf_finetune.py Qwen/Qwen3-8B 262144 # a model, tokens in a row

Every rank reads the same rows, so the Trainer does not split them. DistributedDataParallel takes the mean of the ranks'
gradients where their sum is one device's, so the loss counts once for every rank.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ring_attn_torch.transformers import sequence_parallel


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


class RingTrainer(Trainer):
    """transformers' Trainer where the ranks share each row."""

    def get_train_dataloader(self) -> DataLoader:
        """Return the rows, the same on every rank."""
        return DataLoader(self.train_dataset, batch_size=self._train_batch_size)  # type: ignore[arg-type]

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the loss once for every rank, of whose gradients the mean is taken."""
        loss = super().compute_loss(*arguments, **keywords)
        return loss * self.args.world_size if isinstance(loss, Tensor) else (loss[0] * self.args.world_size, *loss[1:])

    def training_step(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Return the loss that is logged, once."""
        return super().training_step(*arguments, **keywords) / self.args.world_size


def main(name: str | None = None, length: str = "256") -> None:
    torch.manual_seed(0)
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=20,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-2 if name is None else 1e-4,
        average_tokens_across_devices=False,  # every rank has counted the labels of the whole rows
        activation_checkpointing=True,
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
    with sequence_parallel(model):
        trainer = RingTrainer(model=model, args=settings, train_dataset=data)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print("\n".join(f"loss {float(loss):.3f}" for loss in losses))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
