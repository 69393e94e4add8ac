"""Decoding: keys and values that are kept, sharded along the sequence."""
