"""Caches that change hands: from the ranks that prefilled them to those that decode."""
