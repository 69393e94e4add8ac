"""Generation for many sequences that come and go, from a paged pool that is sharded over ranks."""
