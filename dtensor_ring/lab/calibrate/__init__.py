"""Measures a machine: kernels, memory and links."""
