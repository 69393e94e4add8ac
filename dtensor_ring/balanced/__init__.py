"""Layouts made for one batch: every rank gets the same work. Nothing here imports torch."""
