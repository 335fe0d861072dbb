"""The supervisor's view of one process: its output file is bounded."""

import subprocess
from pathlib import Path

import pytest

from rollbook.run.directory import RunDirectory
from rollbook.run.supervision import process as supervised
from rollbook.run.supervision.host import ProcessStart


def test_a_file_with_too_much_output_is_cut_to_its_end_while_its_process_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "MAX_OUTPUT_BYTES", 1000)
    monkeypatch.setattr(supervised, "KEPT_OUTPUT_BYTES", 20)
    directory = RunDirectory(tmp_path)
    process = supervised.SupervisedProcess(ProcessStart(name="env", role="env", directory=directory))
    process.limit_output()  # nothing was written yet
    file = directory.stderr_file("env")
    file.parent.mkdir()
    with file.open("ab") as output:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=output)
    assert child.stdin is not None
    child.stdin.write(b"x" * 900)
    child.stdin.flush()
    while file.stat().st_size < 900:
        pass
    process.limit_output()
    assert file.read_bytes() == b"x" * 900, "small enough"
    child.stdin.write(b"y" * 200)
    child.stdin.flush()
    while file.stat().st_size < 1100:
        pass
    process.limit_output()
    child.stdin.write(b"the end")
    child.stdin.close()
    child.wait()
    assert file.read_bytes() == b"(earlier output was deleted)\n" + b"y" * 20 + b"the end"
