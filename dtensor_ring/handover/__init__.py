"""Transfers of caches: from the ranks that prefilled them to those that decode."""
