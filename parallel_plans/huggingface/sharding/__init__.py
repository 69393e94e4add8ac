"""The inputs of each rank, and the outputs of all ranks."""
