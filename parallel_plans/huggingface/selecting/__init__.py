"""Layers that choose their keys: an indexer scores all tokens before, attention sees the best."""
