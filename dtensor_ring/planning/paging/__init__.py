"""A paged pool of keys and values over ranks: its blocks, and what queries see of them."""
