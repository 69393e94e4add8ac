"""A paged pool of keys and values that is sharded over ranks, and attention to it."""
