"""Moves packets of keys, values and gradients between the ranks."""
