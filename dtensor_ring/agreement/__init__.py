"""What the ranks of a group agree on before they send data."""
