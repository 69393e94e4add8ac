"""One rank, one step: launches of a block kernel, and the merging of their results."""
