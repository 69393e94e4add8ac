"""Computes one step on one rank: launches a block kernel and merges the partial results."""
