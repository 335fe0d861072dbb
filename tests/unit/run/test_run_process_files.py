"""The files about a supervisor and its processes belong to the supervisor that wrote its addresses last."""

from pathlib import Path

import pytest

from rollbook.run.directory import RunDirectory
from rollbook.run.supervision.process import ProcessFiles

OURS, OTHERS = {"ledger": "http://10.0.0.1:1"}, {"ledger": "http://10.0.0.2:2"}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_a_supervisor_removes_its_own_addresses(directory: RunDirectory) -> None:
    files = ProcessFiles(directory, OURS)
    files.write_addresses()
    files.remove_addresses()
    assert not directory.addresses_file.exists()
    files.remove_addresses()


def test_a_replaced_supervisor_leaves_the_files_of_its_successor_alone(directory: RunDirectory) -> None:
    replaced, successor = ProcessFiles(directory, OURS), ProcessFiles(directory, OTHERS)
    replaced.write_addresses()
    successor.write_addresses()
    successor.write_processes([], [], template=7)
    written = [file.read_bytes() for file in (directory.addresses_file, directory.processes_file)]
    replaced.write_processes([], [], template=8)
    replaced.remove_addresses()
    assert [file.read_bytes() for file in (directory.addresses_file, directory.processes_file)] == written
