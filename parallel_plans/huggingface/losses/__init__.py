"""Losses of a sharded sequence."""
