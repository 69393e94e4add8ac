"""A paged pool of keys and values over ranks, and attention to it."""
