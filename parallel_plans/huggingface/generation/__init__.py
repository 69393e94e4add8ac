"""Forwards with a sharded cache, and `generate`."""
