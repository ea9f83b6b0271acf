"""Backends, tile sizes, kernel launches and kernels, independent of the framework."""
