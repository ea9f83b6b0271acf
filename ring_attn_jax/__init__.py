"""Exact ring attention for JAX."""
