"""Checks the package that is installed where this runs: its files, its version, its command."""

import os
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from importlib.metadata import metadata
from importlib.resources import files
from io import StringIO
from runpy import run_module
from unittest.mock import patch

import dtensor_ring
import parallel_plans.huggingface


def run(*arguments: str) -> str:
    """What Python prints, here and in the processes that it starts; none sees the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *arguments]
    told = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


def command(*arguments: str) -> str:
    """What `python -m dtensor_ring` prints, in this process: it has imported torch already."""
    argv = ["dtensor_ring", *arguments]
    with patch.object(sys, "argv", argv), redirect_stdout(StringIO()) as told, suppress(SystemExit):
        run_module("dtensor_ring", run_name="__main__", alter_sys=True)
    return told.getvalue()


def main() -> None:
    """Fail if something is missing."""
    about = metadata("dtensor-ring")
    assert about["Version"] == dtensor_ring.__version__
    for package in (dtensor_ring, parallel_plans.huggingface):
        assert str(package.__file__).startswith(sys.prefix), f"{package.__file__} is not installed"
    for name in ("dtensor_ring", "parallel_plans"):
        assert files(name).joinpath("py.typed").is_file()
    told = command("--version")
    assert told == f"dtensor-ring {dtensor_ring.__version__}\n", told
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert "ring, causal" in run(*launcher, "-m", "dtensor_ring", "doctor")
    print(f"installed {about['Name']} {about['Version']}, extras {about.get_all('Provides-Extra')}")


if __name__ == "__main__":
    main()
