"""The steps of gpu_check.py: each says what it found on a machine."""

import sys
from pathlib import Path

# Steps play rings by what the tests have for it; and nothing need be installed to run here.
sys.path.insert(1, str(Path(__file__).parents[2]))
