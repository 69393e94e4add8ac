"""Who computes what and when, and what is sent to whom: integers and numpy, no torch."""
