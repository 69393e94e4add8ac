"""States that layers carry along the sequence, from rank to rank."""
