"""Checks that all ranks of a group make the same call before they use each other's data."""
