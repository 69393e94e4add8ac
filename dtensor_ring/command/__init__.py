"""The command line: `python -m dtensor_ring`."""
