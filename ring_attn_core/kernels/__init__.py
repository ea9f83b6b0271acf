"""Backends, tile sizes, launches and kernels, independent of the framework."""
