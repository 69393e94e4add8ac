"""`python -m dtensor_ring`: see `dtensor_ring.command.main`."""

import sys

from dtensor_ring.command.main import main
from parallel_plans.models import load, read_config, serve

if __name__ == "__main__":
    sys.exit(main(load, read=read_config, serve=serve))
