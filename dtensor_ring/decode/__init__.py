"""Keys and values that are kept for later tokens, and attention of few queries to them."""
