"""Tokens for heads, and one layout for another."""
