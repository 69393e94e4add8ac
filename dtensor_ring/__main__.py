"""`python -m dtensor_ring`: see `dtensor_ring.command.main`."""

import sys

from dtensor_ring.command.main import main

if __name__ == "__main__":
    sys.exit(main())
