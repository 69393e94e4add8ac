"""A program that imports the package, run by `python -m`."""

import sys

import dtensor_ring

assert sys.argv[1:] == ["dtensor_ring", "--help"]
assert dtensor_ring.Mask.causal()
