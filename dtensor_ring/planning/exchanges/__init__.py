"""Tokens for heads, and one layout for another: who sends what to whom."""
