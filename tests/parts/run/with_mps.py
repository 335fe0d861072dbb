"""`rollbook`, for a machine that passes for one with a GPU: `resources.mps` is accepted for processes that compute on a CPU."""

from unittest import mock

from rollbook.cli.main import main

if __name__ == "__main__":
    with mock.patch("rollbook.run.resources.automatic.mps_faults", return_value=()):
        main()
