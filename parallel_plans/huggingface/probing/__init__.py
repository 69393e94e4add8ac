"""Checks of a model before the plan is applied: it runs on a few tokens."""
