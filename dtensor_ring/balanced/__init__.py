"""Layouts made for one batch: every rank gets the same work. No torch."""
