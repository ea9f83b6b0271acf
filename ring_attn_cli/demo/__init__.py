"""The demo: ``ring-attn compare ring``, then a short training over a ring, in PyTorch and JAX at the same time."""
