"""Decoding with a cache of keys and values that is sharded along the sequence."""
