"""What it costs to deal a sequence in some way, and layouts made for a batch by that."""
