"""Caches that change hands."""
