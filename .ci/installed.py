"""Checks the package that is installed where this runs: its files, its version, its command."""

import subprocess
import sys
from importlib.metadata import metadata
from importlib.resources import files

import dtensor_ring
import parallel_plans.huggingface


def main() -> None:
    """Fail if something is missing."""
    about = metadata("dtensor-ring")
    assert about["Version"] == dtensor_ring.__version__
    for package in (dtensor_ring, parallel_plans.huggingface):
        assert str(package.__file__).startswith(sys.prefix), f"{package.__file__} is not installed"
    for name in ("dtensor_ring", "parallel_plans"):
        assert files(name).joinpath("py.typed").is_file()
    command = [sys.executable, "-I", "-m", "dtensor_ring"]
    told = subprocess.run([*command, "doctor"], capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr
    assert dtensor_ring.__version__ in told.stdout
    print(f"installed {about['Name']} {about['Version']}, extras {about.get_all('Provides-Extra')}")


if __name__ == "__main__":
    main()
