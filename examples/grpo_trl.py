"""Trains by trl's GRPOTrainer on a ring, with the completions of a prompt as a prefix tree, on a tiny random Llama.

    pip install ".[trl]"
    torchrun --nproc-per-node 4 examples/grpo_trl.py

TreeGRPOTrainer overrides the method with which trl 1.16 computes log-probabilities, and the two methods that assign rows to
ranks: here all ranks are one ring, and each has a shard of every row. The reward of a completion is its share of the letter e.
"""

import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

from ring_attn_torch import pack_rollouts, to_layout, token_log_probs, unpack_rollouts
from ring_attn_torch.transformers import sequence_parallel

LETTERS, TOKENS = "abcdefghijklmn", 8


class TreeGRPOTrainer(GRPOTrainer):
    """A GRPOTrainer that computes the log-probabilities of a batch from one prefix tree, over a ring of all ranks."""

    def create_accelerator_and_postprocess(self):
        """Tell accelerate by a mesh that all ranks share their rows."""
        super().create_accelerator_and_postprocess()
        shape = 1, dist.get_world_size()
        mesh = init_device_mesh(self.args.device.type, shape, mesh_dim_names=("dp_replicate", "cp"))
        self.accelerator._prepare_device_mesh = lambda: mesh

    def _get_train_sampler(self, dataset=None):
        """Draw prompts for one ring, not for as many processes as it has ranks."""
        sampler = super()._get_train_sampler(dataset)
        sampler.batch_size //= dist.get_world_size()
        return sampler

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **_
    ):
        """Return the log-probabilities [rows, logits_to_keep] of the completions' tokens, and their entropies if asked."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        present = attention_mask.bool()
        packed = pack_rollouts([ids[own] for ids, own in zip(input_ids.cpu(), present.cpu(), strict=True)])
        logits = model(input_ids=packed.ids.to(input_ids.device), tree=packed.tree, use_cache=False).logits
        labels = to_layout(packed.labels, "zigzag", ranks, pad_value=-100).chunk(ranks, 1)[rank].to(logits.device)

        def rows(values):
            """Place the values of the tree where trl has the tokens of each rollout."""
            places = [own.nonzero()[1:, 0] for own in present]
            each = zip(places, unpack_rollouts(values, packed, layout="zigzag"), strict=True)
            whole = torch.stack([x.new_zeros(input_ids.shape[1]).index_put((place,), x) for place, x in each])
            whole = whole[:, -logits_to_keep:]
            return whole * ranks - (whole * (ranks - 1)).detach()  # DDP divides the gradient by the ranks

        log_probs, entropies = map(rows, token_log_probs(logits, labels, entropy=True, temperature=self.temperature))
        return log_probs, entropies if compute_entropy else None, None


def share_of_e(completions, **_):
    return [completion.count("e") / TOKENS for completion in completions]


def main():
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *LETTERS])}
    letters = Tokenizer(WordLevel(words, unk_token="<pad>"))
    letters.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", padding_side="left")
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes, pad_token_id=0, bos_token_id=0, eos_token_id=1))
    prompts = Dataset.from_list([{"prompt": " ".join(LETTERS[start:] * 3)} for start in range(8)])
    arguments = GRPOConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=8,  # of a ring
        num_generations=8,
        num_iterations=2,
        max_completion_length=TOKENS,
        max_steps=40,
        logging_steps=4,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    )
    trainer = TreeGRPOTrainer(
        model=model, args=arguments, reward_funcs=share_of_e, train_dataset=prompts, processing_class=tokenizer
    )
    set_seed(0)  # trl seeds each process for itself, and here all draw the same completions
    with sequence_parallel(model):
        trainer.train()
    if dist.get_rank() == 0:
        print("rewards", [round(line["reward"], 3) for line in trainer.state.log_history if "reward" in line])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
