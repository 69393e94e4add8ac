"""The steps of gpu_check.py: each says what it found on a machine."""
