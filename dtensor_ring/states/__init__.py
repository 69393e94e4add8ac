"""States of linear attention and Mamba over ranks, at once."""
