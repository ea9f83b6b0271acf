"""Trains by GRPO on a prefix tree over a ring, which computes the prompt once, and compares with the rollouts one by one.

torchrun --nproc-per-node 4 examples/grpo_tree.py

The reward of a completion is the fraction of its tokens that are 7. Each rank also computes every rollout alone, on a copy of
the model, and prints how far loss and gradient differ.
"""

import torch
import torch.distributed as dist

from ring_attn_torch import RingTransformer, pack_rollouts, shard_batch, sum_gradients, token_log_probs, unpack_rollouts

GROUP, TOKENS, LUCKY = 8, 12, 7  # completions of a prompt, their length, and the token that is rewarded

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, ranks = dist.get_rank(), dist.get_world_size()
itself, _ = dist.new_subgroups(1)  # a ring of this rank alone
torch.manual_seed(0)  # the same weights on every rank
model = RingTransformer(vocab=16, dim=32, depth=2, heads=4, kv_heads=2)
alone = RingTransformer(vocab=16, dim=32, depth=2, heads=4, kv_heads=2, group=itself, layout="contiguous")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
prompt = torch.randint(16, (40,)).tolist()


def of_tree(rollouts):
    """Return the log-probabilities of each rollout's tokens after the first, on every rank."""
    packed = pack_rollouts(rollouts)
    shard = shard_batch(packed.ids, "balanced", ranks, rank, labels=packed.labels, tree=packed.tree)
    tree = {"key_extents": shard.key_extents, "longest_path": shard.longest_path, "layout": shard.layout}
    hidden = model(shard.ids, shard.positions, shard.length, **tree, return_hidden=True)
    log_probs = token_log_probs(hidden, shard.labels, head=model.head_weight)  # of this rank's tokens
    return unpack_rollouts(log_probs, packed, layout=shard.layout), packed.saved_tokens


def one_by_one(rollouts):
    """Return the same from the copy of the model, a rollout at a time."""
    every = (torch.tensor([tokens]) for tokens in rollouts)
    return [token_log_probs(alone(ids)[:, :-1], ids[:, 1:])[0] for ids in every]


def grpo(log_probs, old, advantages):
    """Return GRPO's clipped loss, the mean over completions of the mean over their tokens."""
    ratios = [(new[-TOKENS:] - before[-TOKENS:]).exp() for new, before in zip(log_probs, old, strict=True)]
    terms = [torch.minimum(r * a, r.clamp(0.8, 1.2) * a).mean() for r, a in zip(ratios, advantages, strict=True)]
    return -torch.stack(terms).mean()


for step in range(10):
    completions = model.generate([prompt] * GROUP, max_new_tokens=TOKENS, temperature=1.0, seed=step)  # the same on every rank
    rollouts = [prompt + completion for completion in completions]
    rewards = torch.tensor([completion.count(LUCKY) / TOKENS for completion in completions])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    old = None
    for _ in range(2):  # two updates on the same rollouts: from the second on ratios differ from 1
        log_probs, saved = of_tree(rollouts)
        old = old or [x.detach() for x in log_probs]
        loss = grpo(log_probs, old, advantages)
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)  # every rank computed the same loss, and has its own part of the gradient

        alone.load_state_dict(model.state_dict())
        exact = grpo(one_by_one(rollouts), old, advantages)
        gradients = torch.autograd.grad(exact, list(alone.parameters()))
        pairs = [(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True)]
        error = torch.stack([(a - b).norm() for a, b in pairs]).norm() / torch.stack([b.norm() for _, b in pairs]).norm()
        optimizer.step()
    if rank == 0:
        print(
            f"step {step}: reward {rewards.mean():.3f}, loss {loss.item():.5f}, one by one {exact.item():.5f}, "
            f"gradients differ by {error:.1e}, {saved} of {sum(map(len, rollouts))} tokens saved"
        )
dist.destroy_process_group()
