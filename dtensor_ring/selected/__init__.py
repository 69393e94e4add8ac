"""Attention whose queries choose their keys: the best keys of each query, and attention to them."""
