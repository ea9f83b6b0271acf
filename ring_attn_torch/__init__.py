"""Exact ring attention for PyTorch."""
